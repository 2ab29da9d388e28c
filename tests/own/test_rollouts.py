"""Drivers and rollouts over HTTP: who may, what is shown, what is refused and how."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.http import HttpResponse

from accelerators.models import Command, Event, Rollout
from drivers.inventory import DriverReport
from tests.accelerators.test_rollouts import said, work
from tests.own.conftest import Ask, Fill, message, results
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
OFF = DriverReport("pci_driver", state="absent")


def body(response: HttpResponse, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, response.content
    return json.loads(response.content)


def post(ask: Ask, by: str = "operator", **values: Any) -> HttpResponse:
    return ask("/api/rollouts/", by, method="POST", data={"driver": "pci_driver"} | values)


def test_an_operator_installs_a_driver_follows_it_and_sees_it_run(ask: Ask) -> None:
    host = a_host()
    apply(host, OFF, answer(card(1)))
    absent, running = results(ask("/api/drivers/"))
    assert (absent["driver"], absent["installed"], absent["wanted"], absent["drifts"]) == (
        "pci_driver",
        True,
        None,
        False,
    )
    assert absent["seen"] == {
        "generation": 0,
        "version": "",
        "state": "absent",
        "error": "",
        "since": absent["seen"]["since"],
    }
    assert (running["driver"], running["seen"]["state"], running["devices"]) == ("test_driver", "ok", 1)
    settings = {"rules": [{"vendor": "10de"}]}
    made = body(post(ask, op="install", hosts=["cmp1"], settings=settings, reason="the new GPUs"), 202)
    assert (made["state"], made["total"], made["by"], made["counts"]["ordered"]) == ("running", 1, "operator-p1", 1)
    (step,) = made["steps"]
    assert (step["host"], step["state"]) == ("cmp1", "ordered")
    assert step["command"].endswith(f"/api/commands/{Command.objects.get().uuid}/")
    (row,) = results(ask("/api/drivers/?drifts=true"))
    assert row["wanted"]["settings"] == settings
    assert (row["wanted"]["by"], row["wanted"]["generation"], row["seen"]["generation"]) == ("operator-p1", 1, 0)
    said(Command.objects.get())
    work(Rollout.objects.get())
    shown = body(ask(made["url"]))
    assert (shown["state"], shown["counts"]["done"], shown["steps"][0]["text"]) == ("done", 1, "it runs")
    assert results(ask("/api/drivers/?drifts=true")) == []
    assert body(ask(row["url"]))["seen"]["state"] == "ok"
    assert results(ask("/api/rollouts/?driver=pci_driver&op=install&state=done"))[0]["uuid"] == made["uuid"]
    wanted = Event.objects.get(action="driver.wanted")
    assert (wanted.actor, wanted.host, wanted.reason, wanted.subject_name) == (
        "operator-p1",
        "cmp1",
        "the new GPUs",
        "pci_driver on cmp1",
    )
    assert wanted.request_id


def test_many_hosts_by_a_selector_a_few_at_a_time_and_cancelled(ask: Ask) -> None:
    for n in range(4):
        apply(a_host(f"cmp{n}"), OFF)
    made = body(post(ask, op="install", selector={"name": "cmp[0-2]"}, max_parallel=2, stop_on_failure=False), 202)
    assert (made["total"], made["max_parallel"], made["stop_on_failure"]) == (3, 2, False)
    work(Rollout.objects.get())
    cancelled = body(ask(f"{made['url']}cancel/", "operator", method="POST", data={}), 202)
    assert cancelled["state"] == "cancelled"
    assert cancelled["counts"] == {"waiting": 0, "ordered": 2, "done": 0, "failed": 0, "skipped": 1}


def test_one_host_is_refused_at_once_many_each_for_itself(ask: Ask, fill: Fill) -> None:
    fill(20)
    assert " is held by request " in message(post(ask, op="uninstall", hosts=["cmp0"]), 409)
    assert not Rollout.objects.filter(driver="pci_driver").exists()
    body(post(ask, op="uninstall", selector={"all": True}), 202)
    rollout = work(Rollout.objects.get(driver="pci_driver"))
    shown = body(ask(f"/api/rollouts/{rollout.uuid}/"))
    assert (shown["state"], shown["counts"]["failed"], shown["counts"]["skipped"]) == ("stopped", 1, 1)
    assert " is held by request " in shown["steps"][0]["text"]
    held = {row["host"]["name"]: row["held"] for row in results(ask("/api/drivers/?driver=pci_driver"))}
    assert set(held) == {"cmp0", "cmp1"}
    assert all(held.values())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"op": "install"}, "Give either the names of the hosts"),
        ({"op": "install", "hosts": ["cmp1"], "selector": {"all": True}}, "not both"),
        ({"op": "install", "hosts": ["nope"]}, "There is no host nope"),
        ({"op": "install", "hosts": []}, "Give either the names of the hosts"),
        ({"op": "install", "selector": {"zone": "a"}}, "zone: cannot be written; writable fields: all, driver, name"),
        ({"op": "install", "selector": {"driver": "x"}}, "No host is chosen"),
        ({"op": "explode", "hosts": ["cmp1"]}, '"explode" is not a valid choice'),
        ({"op": "update", "hosts": ["cmp1"]}, "Say what to change"),
        ({"op": "uninstall", "hosts": ["cmp1"], "enabled": False}, "Uninstalling takes neither"),
        ({"op": "install", "hosts": ["cmp1"], "settings": []}, "Settings must be an object"),
        ({"op": "install", "hosts": ["cmp1"], "settings": {"token": "x"}}, "settings.token looks like a secret"),
        ({"op": "install", "hosts": ["cmp1"], "max_parallel": 0}, "greater than or equal to 1"),
        ({"op": "install", "hosts": ["cmp1"], "max_parallel": 101}, "less than or equal to 100"),
        ({"op": "install", "hosts": ["cmp1"], "reason": "x" * 501}, "no more than 500 characters"),
        ({"op": "install", "hosts": ["cmp1"], "state": "done"}, "state: cannot be written"),
    ],
)
def test_what_makes_no_sense(ask: Ask, values: dict[str, Any], says: str) -> None:
    apply(a_host(), OFF)
    assert says in message(post(ask, **values), 400)
    assert not Rollout.objects.exists()


def test_a_driver_that_is_not_there_cannot_be_changed(ask: Ask) -> None:
    apply(a_host(), OFF)
    assert "install it there first" in message(post(ask, op="update", hosts=["cmp1"], enabled=True), 409)


@pytest.mark.parametrize("by", ["member", "reader", "nobody"])
def test_others_neither_see_nor_change_drivers(ask: Ask, by: str) -> None:
    apply(a_host(), OFF)
    for path in ("/api/drivers/", "/api/rollouts/"):
        assert "cyborg:driver:get" in message(ask(path, by), 403)
    assert "cyborg:driver:rollout" in message(post(ask, by, op="install", hosts=["cmp1"]), 403)
    assert not Rollout.objects.exists()


def test_filters_and_pages(ask: Ask) -> None:
    for n in range(3):
        apply(a_host(f"cmp{n}"), OFF, DriverReport("a_driver", "it hung"), answer(card(1)))
    assert [row["driver"] for row in results(ask("/api/drivers/?host=cmp1"))] == [
        "a_driver",
        "pci_driver",
        "test_driver",
    ]
    assert len(results(ask("/api/drivers/?state=failed&state=absent"))) == 6
    assert len(results(ask("/api/drivers/?driver=test_driver"))) == 3
    seen, path = [], "/api/drivers/?limit=2"
    while path:
        page = json.loads(ask(path).content)
        seen += [row["key"] for row in page["results"]]
        path = page["next"]
    assert len(seen) == len(set(seen)) == 9
    assert "drivers" in body(ask("/api/"))
