"""Test drivers and rollouts over /api/: permissions, contents, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.http import HttpResponse

from accelerators import conductor
from accelerators.models import Command, Event, Rollout, RolloutStep
from drivers.inventory import DriverReport
from tests.accelerators.api.own.conftest import Ask, Fill, get_error_message, get_results
from tests.accelerators.workflows.test_rollouts import answer_as_agent, run_rollout
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
ABSENT_DRIVER = DriverReport("pci_driver", state="absent")


def get_body(response: HttpResponse, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, response.content
    return json.loads(response.content)


def post_rollout(ask: Ask, by: str = "operator", **fields: Any) -> HttpResponse:
    return ask("/api/rollouts/", by, method="POST", data={"driver": "pci_driver"} | fields)


def test_an_operator_installs_a_driver_and_follows_the_rollout_to_its_end(ask: Ask) -> None:
    host = get_or_create_host()
    apply_report(host, ABSENT_DRIVER, make_driver_report(make_card(1)))
    absent, running = get_results(ask("/api/drivers/"))
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
        "declares": {},
    }
    assert (running["driver"], running["seen"]["state"], running["devices"]) == ("test_driver", "ok", 1)
    settings = {"rules": [{"vendor": "10de"}]}
    made = get_body(post_rollout(ask, op="install", hosts=["cmp1"], settings=settings, reason="the new GPUs"), 202)
    assert (made["state"], made["total"], made["by"], made["counts"]["ordered"]) == ("running", 1, "operator-p1", 1)
    (step,) = made["steps"]
    assert (step["host"], step["state"]) == ("cmp1", "ordered")
    assert step["command"].endswith(f"/api/commands/{Command.objects.get().uuid}/")
    (row,) = get_results(ask("/api/drivers/?drifts=true"))
    assert row["wanted"]["settings"] == settings
    assert (row["wanted"]["by"], row["wanted"]["generation"], row["seen"]["generation"]) == ("operator-p1", 1, 0)
    answer_as_agent(Command.objects.get())
    run_rollout(Rollout.objects.get())
    shown = get_body(ask(made["url"]))
    assert (shown["state"], shown["counts"]["done"], shown["steps"][0]["text"]) == ("done", 1, "it runs")
    assert get_results(ask("/api/drivers/?drifts=true")) == []
    assert get_body(ask(row["url"]))["seen"]["state"] == "ok"
    assert get_results(ask("/api/rollouts/?driver=pci_driver&op=install&state=done"))[0]["uuid"] == made["uuid"]
    wanted = Event.objects.get(action="driver.wanted")
    assert (wanted.actor, wanted.host, wanted.reason, wanted.subject_name) == (
        "operator-p1",
        "cmp1",
        "the new GPUs",
        "pci_driver on cmp1",
    )
    assert wanted.request_id


def test_a_rollout_by_selector_orders_max_parallel_hosts_and_can_be_cancelled(ask: Ask) -> None:
    for n in range(4):
        apply_report(get_or_create_host(f"cmp{n}"), ABSENT_DRIVER)
    made = get_body(
        post_rollout(ask, op="install", selector={"name": "cmp[0-2]"}, max_parallel=2, stop_on_failure=False), 202
    )
    assert (made["total"], made["max_parallel"], made["stop_on_failure"]) == (3, 2, False)
    run_rollout(Rollout.objects.get())
    cancelled = get_body(ask(f"{made['url']}cancel/", "operator", method="POST", data={}), 202)
    assert cancelled["state"] == "cancelled"
    assert cancelled["counts"] == {"waiting": 0, "ordered": 2, "done": 0, "failed": 0, "skipped": 1}


def test_the_progress_of_a_rollout_is_read_without_its_hosts_and_its_failed_hosts_alone(
    ask: Ask, django_assert_num_queries: Any
) -> None:
    for n in range(4):
        apply_report(get_or_create_host(f"cmp{n}"), ABSENT_DRIVER)
    made = get_body(post_rollout(ask, op="install", selector={"all": True}, stop_on_failure=False), 202)
    with conductor.writing():
        RolloutStep.objects.filter(host_name="cmp2").update(state="failed", text="no such GPU")
    progress = get_body(ask(made["url"] + "?fields=state,counts"))
    assert progress == {
        "state": "running",
        "counts": {"waiting": 3, "ordered": 0, "done": 0, "failed": 1, "skipped": 0},
    }
    failed = get_body(ask(made["url"] + "?fields=steps&step_state=failed"))
    assert [(step["host"], step["text"]) for step in failed["steps"]] == [("cmp2", "no such GPU")]
    assert len(get_body(ask(made["url"] + "?step_state=waiting"))["steps"]) == 3
    assert "step_state: say one of" in get_error_message(ask(made["url"] + "?step_state=broken"), 400)


def test_a_rollout_to_one_held_host_is_refused_and_to_many_hosts_fails_only_there(ask: Ask, fill: Fill) -> None:
    fill(20)
    assert " is held by request " in get_error_message(post_rollout(ask, op="uninstall", hosts=["cmp0"]), 409)
    assert not Rollout.objects.filter(driver="pci_driver").exists()
    get_body(post_rollout(ask, op="uninstall", selector={"all": True}), 202)
    rollout = run_rollout(Rollout.objects.get(driver="pci_driver"))
    shown = get_body(ask(f"/api/rollouts/{rollout.uuid}/"))
    assert (shown["state"], shown["counts"]["failed"], shown["counts"]["skipped"]) == ("stopped", 1, 1)
    assert " is held by request " in shown["steps"][0]["text"]
    held = {row["host"]["name"]: row["held"] for row in get_results(ask("/api/drivers/?driver=pci_driver"))}
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
def test_invalid_rollouts_are_refused_and_not_stored(ask: Ask, values: dict[str, Any], says: str) -> None:
    apply_report(get_or_create_host(), ABSENT_DRIVER)
    assert says in get_error_message(post_rollout(ask, **values), 400)
    assert not Rollout.objects.exists()


def test_updating_a_driver_that_is_not_installed_is_refused(ask: Ask) -> None:
    apply_report(get_or_create_host(), ABSENT_DRIVER)
    assert "install it there first" in get_error_message(
        post_rollout(ask, op="update", hosts=["cmp1"], enabled=True), 409
    )


@pytest.mark.parametrize("by", ["member", "reader", "nobody"])
def test_members_and_readers_may_neither_see_nor_change_drivers(ask: Ask, by: str) -> None:
    apply_report(get_or_create_host(), ABSENT_DRIVER)
    for path in ("/api/drivers/", "/api/rollouts/"):
        assert "cyborg:driver:get" in get_error_message(ask(path, by), 403)
    assert "cyborg:driver:rollout" in get_error_message(post_rollout(ask, by, op="install", hosts=["cmp1"]), 403)
    assert not Rollout.objects.exists()


def test_drivers_can_be_filtered_and_paged(ask: Ask) -> None:
    for n in range(3):
        apply_report(
            get_or_create_host(f"cmp{n}"),
            ABSENT_DRIVER,
            DriverReport("a_driver", "it hung"),
            make_driver_report(make_card(1)),
        )
    assert [row["driver"] for row in get_results(ask("/api/drivers/?host=cmp1"))] == [
        "a_driver",
        "pci_driver",
        "test_driver",
    ]
    assert len(get_results(ask("/api/drivers/?state=failed&state=absent"))) == 6
    assert len(get_results(ask("/api/drivers/?driver=test_driver"))) == 3
    seen, path = [], "/api/drivers/?limit=2"
    while path:
        page = json.loads(ask(path).content)
        seen += [row["key"] for row in page["results"]]
        path = page["next"]
    assert len(seen) == len(set(seen)) == 9
    assert "drivers" in get_body(ask("/api/"))
