"""Test that backends are added, changed, disabled and removed one at a time over /api/."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import pytest
from django.http import HttpResponse

from accelerators import conductor
from accelerators.models import Command, DriverWish, Event, Host, Rollout
from drivers.generic.driver import GenericDriver
from drivers.inventory import DriverReport
from tests.accelerators.api.own.conftest import Ask, Fill, get_error_message, get_results
from tests.accelerators.workflows.test_rollouts import answer_as_agent, run_rollout
from tests.support.reports import apply_report, get_or_create_host

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]
GPUS = {"kind": "pci", "match": [{"vendor": "10de"}], "limits": {"max_devices": 4}}
NICS = {"kind": "pci", "match": [{"class": "02*"}]}


def get_body(response: HttpResponse, status: int = 202) -> dict[str, Any]:
    assert response.status_code == status, response.content
    return json.loads(response.content)


def get_present() -> dict[str, Any]:
    """Return the field `generation` with the present generation of the driver."""
    return {"generation": DriverWish.objects.values_list("generation", flat=True).first() or 0}


def add(ask: Ask, name: str, settings: dict[str, Any], by: str = "operator", **fields: Any) -> HttpResponse:
    body = {"host": "cmp1", "name": name, "settings": settings} | get_present() | fields
    return ask("/api/backends/", by, method="POST", data=body)


def get_path(name: str, driver: str = "generic_driver") -> str:
    return f"/api/backends/{Host.objects.get(name='cmp1').uuid}:{driver}:{name}/"


def change(ask: Ask, name: str, by: str = "operator", **fields: Any) -> HttpResponse:
    return ask(get_path(name), by, method="PATCH", data=get_present() | fields)


def remove(ask: Ask, name: str, by: str = "operator", **query: Any) -> HttpResponse:
    return ask(f"{get_path(name)}?{urlencode(get_present() | query)}", by, method="DELETE")


def finish(response: HttpResponse) -> dict[str, Any]:
    """Let the agent apply the rollout of a successful answer; return the answer."""
    answer = get_body(response)
    assert answer["total"] == 1 and answer["steps"][0]["host"] == "cmp1"
    answer_as_agent(Command.objects.latest("id"), version=GenericDriver.version)
    run_rollout(Rollout.objects.latest("id"))
    return answer


def get_sections() -> dict[str, Any]:
    return dict(DriverWish.objects.get().settings["backends"])


@pytest.fixture
def installed(ask: Ask) -> None:
    """Install generic_driver on cmp1 with one backend."""
    apply_report(get_or_create_host(), DriverReport("generic_driver", state="absent"))
    body = {"driver": "generic_driver", "op": "install", "hosts": ["cmp1"], "settings": {"backends": {"gpus": GPUS}}}
    body["generation"] = 0
    finish(ask("/api/rollouts/", "operator", method="POST", data=body))


@pytest.mark.slow
def test_backends_are_added_changed_disabled_and_removed_one_at_a_time(ask: Ask, installed: None) -> None:
    answer = finish(add(ask, "nics", NICS, reason="new cards", generation=1))
    assert answer["url"].endswith(f"/api/rollouts/{Rollout.objects.latest('id').uuid}/")
    assert get_sections() == {"gpus": GPUS, "nics": NICS}
    assert Event.objects.filter(action="driver.wanted", reason="new cards").exists()
    finish(change(ask, "gpus", set={"limits/max_devices": 8, "labels": {"rack": "r1"}}))
    changed = GPUS | {"limits": {"max_devices": 8}}
    assert get_sections() == {"gpus": changed | {"labels": {"rack": "r1"}}, "nics": NICS}
    finish(change(ask, "gpus", enabled=False, unset=["labels"]))
    assert get_sections() == {"gpus": changed | {"enabled": False}, "nics": NICS}
    finish(change(ask, "gpus", enabled=True))
    assert get_sections()["gpus"]["enabled"] is True
    finish(remove(ask, "gpus", generation=5, reason="sold"))
    assert get_sections() == {"nics": NICS}
    assert Event.objects.filter(action="driver.wanted", reason="sold").exists()


def test_a_change_of_a_backend_based_on_an_older_generation_is_refused(ask: Ask, installed: None) -> None:
    finish(add(ask, "nics", NICS))
    for refused in (
        add(ask, "others", NICS, generation=1),
        change(ask, "gpus", enabled=False, generation=1),
        remove(ask, "gpus", generation=1),
    ):
        body = get_body(refused, 409)
        assert "generic_driver on cmp1 is at generation 2 now, not 1" in body["error"]["message"]
        assert body["current"] == get_results(ask("/api/drivers/"))[0]
    assert get_sections() == {"gpus": GPUS, "nics": NICS}


def test_a_change_of_a_backend_without_a_generation_is_refused(ask: Ask, installed: None) -> None:
    body = {"host": "cmp1", "name": "nics", "settings": NICS}
    for refused in (
        ask("/api/backends/", "operator", method="POST", data=body),
        ask(get_path("gpus"), "operator", method="PATCH", data={"enabled": False}),
        ask(get_path("gpus"), "operator", method="DELETE"),
    ):
        answer = get_body(refused, 428)
        assert "generic_driver on cmp1 is at generation 1 now. Send the generation" in answer["error"]["message"]
        assert answer["error"]["reason"] == "no_generation"
        assert answer["current"] == get_results(ask("/api/drivers/"))[0]
    assert get_sections() == {"gpus": GPUS}


def test_backends_of_held_devices_are_not_removed(ask: Ask, fill: Fill) -> None:
    (host,) = fill(3)
    driver = host.devices.first().driver
    wish = {"settings": {"backends": {"gpus": GPUS, "nics": NICS}}, "generation": 4}
    with conductor.writing():
        Host.objects.filter(pk=host.pk).update(name="cmp1")
        DriverWish.objects.create(host=host, driver=driver, **wish)
    for response in (
        ask(f"{get_path('gpus', driver)}?generation=4", "operator", method="DELETE"),
        ask(get_path("gpus", driver), "operator", method="PATCH", data={"enabled": False, "generation": 4}),
    ):
        text = get_error_message(response, 409, "in_use")
        assert " is held by request " in text and " of instance " in text
    assert get_sections() == {"gpus": GPUS, "nics": NICS}


def test_settings_that_the_driver_cannot_use_are_refused_and_not_stored(ask: Ask, installed: None) -> None:
    rollouts, commands = Rollout.objects.count(), Command.objects.count()
    body = {"driver": "generic_driver", "op": "update", "hosts": ["cmp1"], "settings": {"backends": {"gpus": {}}}}
    for refused, says in (
        (add(ask, "nics", {"kind": "pci"}), "backend nics of generic_driver is not usable: Object missing required"),
        (add(ask, "nics", NICS | {"colour": "red"}), "unknown field `colour`"),
        (change(ask, "gpus", set={"limits/max_devces": 8}), "unknown field `max_devces` - at `$.limits`"),
        (change(ask, "gpus", unset=["match"]), "missing required field `match`"),
        (ask("/api/rollouts/", "operator", method="POST", data=body | get_present()), "missing required field `kind`"),
        (ask("/api/rollouts/", "operator", method="POST", data=body | get_present() | {"dry_run": True}), "`kind`"),
    ):
        text = get_error_message(refused, 400)
        assert says in text and "Nothing was changed" in text
    assert (Rollout.objects.count(), Command.objects.count()) == (rollouts, commands)
    assert get_sections() == {"gpus": GPUS} and DriverWish.objects.get().generation == 1


def test_wrong_changes_of_backends_are_refused(ask: Ask, installed: None) -> None:
    assert "exists already" in get_error_message(add(ask, "gpus", NICS), 409, "conflict")
    assert "at most 64 letters" in get_error_message(add(ask, "a b", NICS), 400)
    assert "Say the kind" in get_error_message(add(ask, "nics", {}), 400)
    assert "looks like a secret" in get_error_message(add(ask, "nics", NICS | {"password": "x"}), 400)
    assert "There is no host cmp9" in get_error_message(add(ask, "nics", NICS, host="cmp9"), 400)
    assert "is not installed on cmp1" in get_error_message(
        add(ask, "nics", NICS, driver="pci_driver", generation=0), 409
    )
    for broken in ({"unset": ["kind"]}, {"set": {"kind": None}}, {"set": {"kind": 3}}):
        assert "Say the kind" in get_error_message(change(ask, "gpus", **broken), 400)
    assert "Say what to change" in get_error_message(change(ask, "gpus"), 400)
    for refused in (change(ask, "nics", enabled=True), remove(ask, "nics")):
        assert "is not in the settings that are set here" in get_error_message(refused, 404)
    for refused in (
        add(ask, "nics", NICS, by="reader"),
        change(ask, "gpus", "reader", enabled=False),
        remove(ask, "gpus", "reader"),
    ):
        get_error_message(refused, 403)
    assert get_sections() == {"gpus": GPUS}
