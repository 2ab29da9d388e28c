"""Backends and services over /api/: what a report says of them, and a backend that fails by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.http import HttpResponse

from accelerators.models import Event, Host
from drivers.inventory import Backend, Device, DriverReport, Service
from tests.own.conftest import Ask, results
from tests.support.reports import a_host, apply, card

pytestmark = pytest.mark.django_db

READY = Service("sriov", limits={"total_vfs": "8"})
AWAY = Service("passthrough", state="unavailable", reason="no IOMMU: switch it on")


def say(host: Host, seq: int, *devices: Device, error: str = "", **errors: str) -> None:
    """A report of backends nics and disks, and of another driver without any."""
    backends = tuple(
        Backend(name, "pci", {"rack": "r1"}, errors.get(name, ""), () if name in errors else (READY, AWAY))
        for name in ("nics", "disks")
    )
    generic = DriverReport("generic_driver", error, () if error else devices, backends=() if error else backends)
    apply(host, generic, DriverReport("pci_driver", devices=(card(9),)), seq=seq)


def devices(ask: Ask, query: str = "") -> dict[str, dict[str, Any]]:
    return {row["address"]: row for row in results(ask(f"/api/devices/?{query}"))}


def shown(response: HttpResponse) -> list[tuple[str, ...]]:
    return [(row["host"], row["driver"], row["name"]) for row in results(response)]


@pytest.fixture
def host(db: None) -> Host:
    host = a_host()
    say(host, 1, card(1, backend="nics", changeable="bind vfs", sized_by="vfs"), card(2, backend="disks"))
    return host


def test_backends_and_services_are_rows(ask: Ask, host: Host) -> None:
    say(other := a_host("cmp2"), 1)
    names = [("cmp1", "disks"), ("cmp1", "nics"), ("cmp2", "disks"), ("cmp2", "nics")]
    assert shown(ask("/api/backends/")) == [(where, "generic_driver", name) for where, name in names]
    assert shown(ask("/api/backends/?ordering=-host&limit=1")) == [("cmp2", "generic_driver", "nics")]
    (row,) = results(ask("/api/backends/?host=cmp1&name=nics&driver=generic_driver&kind=pci"))
    assert row["id"] == f"{host.uuid}:generic_driver:nics"
    assert (row["devices"], row["error"], row["labels"], row["kind"]) == (1, "", {"rack": "r1"}, "pci")
    assert [service["name"] for service in row["services"]] == ["sriov", "passthrough"]
    assert json.loads(ask(f"/api/backends/{row['id']}/").content) == row
    assert ask(f"/api/backends/{other.uuid}:generic_driver:gpus/").status_code == 404
    assert ask("/api/backends/?kind=gpu").status_code == 400
    found = results(ask("/api/services/?host=cmp1&backend=nics&state=unavailable"))
    assert [(one["name"], one["reason"], one["version"]) for one in found] == [("passthrough", AWAY.reason, "1")]
    assert [one["limits"] for one in results(ask("/api/services/?name=sriov&host=cmp2"))] == [{"total_vfs": "8"}] * 2
    assert json.loads(ask(f"/api/services/{found[0]['id']}/").content) == found[0]
    first = json.loads(ask("/api/services/?limit=5").content)
    assert len(first["results"] + json.loads(ask(first["next"]).content)["results"]) == 8


@pytest.mark.parametrize("path", ["/api/backends/", "/api/services/"])
def test_who_runs_accelerators_sees_them_and_others_do_not(ask: Ask, host: Host, path: str) -> None:
    assert [ask(path, by).status_code for by in ("admin", "manager", "member", "")] == [200, 200, 403, 401]
    assert ask(path, method="POST", data={}).status_code == 405


def test_a_backend_that_fails_keeps_its_devices_and_the_others_go_on(ask: Ask, host: Host) -> None:
    say(host, 2, card(3, backend="nics"), disks="the kernel holds it")
    found = devices(ask)
    assert {address: row["state"] for address, row in found.items()} == {
        "0000:01:00.0": "missing",
        "0000:02:00.0": "inactive",
        "0000:03:00.0": "inactive",
        "0000:09:00.0": "inactive",
    }
    assert (
        found["0000:02:00.0"]["stale"] == "generic_driver: the kernel holds it" and not found["0000:03:00.0"]["stale"]
    )
    assert list(devices(ask, "stale=true")) == ["0000:02:00.0"] and len(devices(ask, "stale=false")) == 3
    rows = {row["name"]: row for row in results(ask("/api/backends/"))}
    assert rows["disks"]["error"] == "the kernel holds it" and rows["disks"]["services"] == []
    host.refresh_from_db()
    assert host.drivers["generic_driver"]["devices"] == 2
    say(host, 3, card(3, backend="nics"), card(2, backend="disks"))
    assert not devices(ask, "stale=true")
    told = Event.objects.filter(subject_type="backend").order_by("id").values_list("action", "subject_name")
    assert list(told) == [("backend.failed", "generic_driver:disks"), ("backend.recovered", "generic_driver:disks")]


def test_a_backend_that_answers_and_has_nothing_has_lost_its_devices(ask: Ask, host: Host) -> None:
    say(host, 2, card(1, backend="nics"), nics="")
    assert devices(ask)["0000:02:00.0"]["state"] == "missing"


def test_a_driver_that_fails_keeps_its_backends(ask: Ask, host: Host) -> None:
    say(host, 2, error="it hung for 20 s")
    assert len(results(ask("/api/backends/"))) == 2
    assert devices(ask)["0000:01:00.0"]["stale"] == "generic_driver: it hung for 20 s"
