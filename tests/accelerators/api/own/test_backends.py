"""Test backends and services over /api/: how reports change them, and the failure of a single backend."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db.models.functions import Now
from django.http import HttpResponse

from accelerators import conductor
from accelerators.models import DriverWish, Event, Host
from drivers.inventory import Backend, Device, DriverReport, Service
from tests.accelerators.api.own.conftest import Ask, get_results
from tests.support.reports import apply_report, get_or_create_host, make_card

pytestmark = pytest.mark.django_db

READY_SERVICE = Service("sriov", limits={"total_vfs": "8"})
UNAVAILABLE_SERVICE = Service("passthrough", state="unavailable", reason="no IOMMU: switch it on")


def report_backends(host: Host, seq: int, *devices: Device, error: str = "", **errors: str) -> None:
    """Report the backends nics and disks of generic_driver, and a second driver without backends.

    `error` is the error of generic_driver; `errors` are those of single backends, by name.
    """
    backends = tuple(
        Backend(
            name,
            "pci",
            {"rack": "r1"},
            errors.get(name, ""),
            () if name in errors else (READY_SERVICE, UNAVAILABLE_SERVICE),
        )
        for name in ("nics", "disks")
    )
    generic = DriverReport("generic_driver", error, () if error else devices, backends=() if error else backends)
    apply_report(host, generic, DriverReport("pci_driver", devices=(make_card(9),)), seq=seq)


def get_devices_by_address(ask: Ask, query: str = "") -> dict[str, dict[str, Any]]:
    return {row["address"]: row for row in get_results(ask(f"/api/devices/?{query}"))}


def list_backend_keys(response: HttpResponse) -> list[tuple[str, ...]]:
    return [(row["host"], row["driver"], row["name"]) for row in get_results(response)]


@pytest.fixture
def host(db: None) -> Host:
    host = get_or_create_host()
    report_backends(
        host, 1, make_card(1, backend="nics", changeable="bind vfs", sized_by="vfs"), make_card(2, backend="disks")
    )
    return host


def test_backends_and_services_are_listed_filtered_and_shown(ask: Ask, host: Host) -> None:
    report_backends(other := get_or_create_host("cmp2"), 1)
    names = [("cmp1", "disks"), ("cmp1", "nics"), ("cmp2", "disks"), ("cmp2", "nics")]
    assert list_backend_keys(ask("/api/backends/")) == [(where, "generic_driver", name) for where, name in names]
    assert list_backend_keys(ask("/api/backends/?ordering=-host&limit=1")) == [("cmp2", "generic_driver", "nics")]
    (row,) = get_results(ask("/api/backends/?host=cmp1&name=nics&driver=generic_driver&kind=pci"))
    assert row["id"] == f"{host.uuid}:generic_driver:nics"
    assert (row["devices"], row["error"], row["labels"], row["kind"]) == (1, "", {"rack": "r1"}, "pci")
    assert [service["name"] for service in row["services"]] == ["sriov", "passthrough"]
    assert json.loads(ask(f"/api/backends/{row['id']}/").content) == row
    assert ask(f"/api/backends/{other.uuid}:generic_driver:gpus/").status_code == 404
    assert ask("/api/backends/?kind=gpu").status_code == 400
    found = get_results(ask("/api/services/?host=cmp1&backend=nics&state=unavailable"))
    assert [(one["name"], one["reason"], one["version"]) for one in found] == [
        ("passthrough", UNAVAILABLE_SERVICE.reason, "1")
    ]
    assert [one["limits"] for one in get_results(ask("/api/services/?name=sriov&host=cmp2"))] == [
        {"total_vfs": "8"}
    ] * 2
    assert json.loads(ask(f"/api/services/{found[0]['id']}/").content) == found[0]
    first = json.loads(ask("/api/services/?limit=5").content)
    assert len(first["results"] + json.loads(ask(first["next"]).content)["results"]) == 8


def store_wish(host: Host, driver: str = "generic_driver", **values: Any) -> None:
    with conductor.writing():
        DriverWish.objects.update_or_create(host=host, driver=driver, defaults=values)


def get_states(ask: Ask, query: str = "") -> dict[str, tuple[str, str]]:
    """Return the state and the reason of each backend by name."""
    return {row["name"]: (row["state"], row["reason"]) for row in get_results(ask(f"/api/backends/?{query}"))}


def test_backends_that_are_configured_and_not_reported_are_listed_with_their_state_and_reason(
    ask: Ask, host: Host
) -> None:
    gpus, off = {"kind": "mdev", "labels": {"rack": "r2"}}, {"kind": "remote", "enabled": False}
    settings = {"backends": {"nics": {"kind": "pci"}, "gpus": gpus, "off": off}}
    etag = ask("/api/backends/")["ETag"]
    store_wish(host, settings=settings, generation=7)
    assert ask("/api/backends/")["ETag"] != etag
    assert get_states(ask) == {
        "disks": ("answering", ""),
        "nics": ("answering", ""),
        "gpus": (
            "waiting",
            "It is configured, but the agent does not run the driver with these settings yet.",
        ),
        "off": ("disabled", "It is disabled in its settings."),
    }
    (row,) = get_results(ask("/api/backends/?state=waiting&kind=mdev"))
    assert (row["settings"], row["generation"], row["labels"]) == (gpus, 7, {"rack": "r2"})
    assert (row["services"], row["devices"], row["error"], row["kind"]) == ([], 0, "", "mdev")
    assert json.loads(ask(f"/api/backends/{host.uuid}:generic_driver:gpus/").content) == row
    assert [row["settings"] for row in get_results(ask("/api/backends/?name=disks"))] == [None]
    assert ask("/api/backends/?state=unknown").status_code == 400

    generic = DriverReport("generic_driver", backends=(Backend("nics", "pci"),), generation=7)
    apply_report(host, generic, seq=2)
    assert get_states(ask)["gpus"] == ("waiting", "It is configured, but its driver has not reported it yet.")
    apply_report(host, DriverReport("generic_driver", "it crashed", generation=7), seq=3)
    assert get_states(ask)["gpus"] == ("waiting", "It is configured, but its driver fails: it crashed")
    with conductor.writing():
        Host.objects.update(stale_since=Now())
    assert get_states(ask)["gpus"][1] == "It is configured, but the agent of the host is not heard from."
    store_wish(host, enabled=False)
    assert get_states(ask, "name=gpus")["gpus"] == ("disabled", "Its driver is disabled on this host.")
    store_wish(host, installed=False)
    assert "gpus" not in get_states(ask)


@pytest.mark.parametrize("settings", [None, {}, {"backends": []}, {"backends": {}}, {"mtu": 1500}])
def test_wanted_settings_without_backends_add_none_to_the_list(ask: Ask, host: Host, settings: Any) -> None:
    store_wish(host, settings=settings)
    assert [*get_states(ask)] == ["disks", "nics"]


def test_a_section_that_is_no_table_is_listed_as_well(ask: Ask, host: Host) -> None:
    store_wish(host, settings={"backends": {"broken": 3, "labels": {"labels": 7}}}, generation=1)
    assert {name: state for name, (state, _) in get_states(ask).items()} == {
        **dict.fromkeys(("disks", "nics"), "answering"),
        **dict.fromkeys(("broken", "labels"), "waiting"),
    }


@pytest.mark.parametrize("path", ["/api/backends/", "/api/services/"])
def test_backends_and_services_are_shown_to_admins_and_managers_only(ask: Ask, host: Host, path: str) -> None:
    assert [ask(path, by).status_code for by in ("admin", "manager", "member", "")] == [200, 200, 403, 401]
    assert ask(path, "manager", method="POST", data={}).status_code == (403 if path == "/api/backends/" else 405)


def test_a_failed_backend_keeps_its_devices_as_stale_and_others_are_updated(ask: Ask, host: Host) -> None:
    report_backends(host, 2, make_card(3, backend="nics"), disks="the kernel holds it")
    found = get_devices_by_address(ask)
    assert {address: row["state"] for address, row in found.items()} == {
        "0000:01:00.0": "missing",
        "0000:02:00.0": "inactive",
        "0000:03:00.0": "inactive",
        "0000:09:00.0": "inactive",
    }
    assert (
        found["0000:02:00.0"]["stale"] == "generic_driver: the kernel holds it" and not found["0000:03:00.0"]["stale"]
    )
    assert (
        list(get_devices_by_address(ask, "stale=true")) == ["0000:02:00.0"]
        and len(get_devices_by_address(ask, "stale=false")) == 3
    )
    assert [row["name"] for row in get_results(ask("/api/backends/?failing=true"))] == ["disks"]
    assert [row["name"] for row in get_results(ask("/api/backends/?failing=false"))] == ["nics"]
    rows = {row["name"]: row for row in get_results(ask("/api/backends/"))}
    assert rows["disks"]["error"] == "the kernel holds it" and rows["disks"]["services"] == []
    host.refresh_from_db()
    assert host.drivers["generic_driver"]["devices"] == 2
    report_backends(host, 3, make_card(3, backend="nics"), make_card(2, backend="disks"))
    assert not get_devices_by_address(ask, "stale=true")
    backend_events = Event.objects.filter(subject_type="backend").order_by("id").values_list("action", "subject_name")
    assert list(backend_events) == [
        ("backend.failed", "generic_driver:disks"),
        ("backend.recovered", "generic_driver:disks"),
    ]


def test_devices_of_a_backend_that_answers_without_them_become_missing(ask: Ask, host: Host) -> None:
    report_backends(host, 2, make_card(1, backend="nics"), nics="")
    assert get_devices_by_address(ask)["0000:02:00.0"]["state"] == "missing"


def test_a_driver_that_fails_keeps_its_backends(ask: Ask, host: Host) -> None:
    report_backends(host, 2, error="it hung for 20 s")
    assert len(get_results(ask("/api/backends/"))) == 2
    assert get_devices_by_address(ask)["0000:01:00.0"]["stale"] == "generic_driver: it hung for 20 s"
