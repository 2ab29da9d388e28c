"""Test drivers and rollouts over /api/: permissions, contents, and refusals."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.models import Command, DriverWish, Event, Rollout, RolloutStep
from accelerators.workflows import driver_rollouts
from drivers.inventory import DriverReport
from tests.accelerators.api.own.conftest import Ask, Fill, get_error_message, get_results
from tests.accelerators.workflows.test_rollouts import answer_as_agent, run_rollout
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]
ABSENT_DRIVER = DriverReport("pci_driver", state="absent")


def get_body(response: HttpResponse, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, response.content
    return json.loads(response.content)


def post_rollout(ask: Ask, by: str = "operator", **fields: Any) -> HttpResponse:
    """Start a rollout; on one host it is based on the present generation unless the fields name another."""
    driver, hosts = fields.get("driver", "pci_driver"), fields.get("hosts", ())
    wish = DriverWish.objects.filter(driver=driver, host__name__in=hosts).first() if len(hosts) == 1 else None
    present = {"generation": wish.generation if wish else 0} if len(hosts) == 1 else {}
    return ask("/api/rollouts/", by, method="POST", data={"driver": driver} | present | fields)


def confirm_rollout(ask: Ask, path: str = "/api/rollouts/", by: str = "operator", **fields: Any) -> dict[str, Any]:
    """Send a request that needs a confirmation; check that it is refused with its preview, and send it with the
    token."""
    body = get_body(ask(path, by, method="POST", data=fields), 409)
    assert body["error"]["reason"] == "not_confirmed" and body["preview"]["confirm"]
    return get_body(ask(path, by, method="POST", data=fields | {"token": body["preview"]["token"]}), 202)


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
    order = {"driver": "pci_driver", "op": "install", "selector": {"name": "cmp[0-2]"}}
    made = confirm_rollout(ask, **order, max_parallel=2, stop_on_failure=False)
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
    order = {"driver": "pci_driver", "op": "install", "selector": {"all": True}}
    made = confirm_rollout(ask, **order, stop_on_failure=False)
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


@pytest.mark.slow
def test_a_rollout_to_one_held_host_is_refused_and_to_many_hosts_skips_those_that_the_preview_showed_as_refused(
    ask: Ask, fill: Fill
) -> None:
    fill(20)
    assert " is held by request " in get_error_message(post_rollout(ask, op="uninstall", hosts=["cmp0"]), 409)
    assert not Rollout.objects.filter(driver="pci_driver").exists()
    confirm_rollout(ask, driver="pci_driver", op="uninstall", selector={"all": True})
    rollout = run_rollout(Rollout.objects.get(driver="pci_driver"))
    shown = get_body(ask(f"/api/rollouts/{rollout.uuid}/"))
    assert (shown["state"], shown["counts"]["failed"], shown["counts"]["skipped"]) == ("done", 0, 2)
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


def create_hosts(number: int) -> None:
    """Create hosts cmp0, cmp1… on which `test_driver` runs with one device."""
    for n in range(number):
        apply_report(get_or_create_host(f"cmp{n}"), make_driver_report(make_card(1)))


DISABLE_EVERYWHERE = {"driver": "test_driver", "op": "update", "enabled": False, "selector": {"all": True}}


@pytest.mark.slow
def test_a_driver_is_disabled_on_several_hosts_only_with_the_token_of_the_preview(ask: Ask) -> None:
    create_hosts(3)
    body = get_body(post_rollout(ask, **DISABLE_EVERYWHERE), 409)
    preview = body["preview"]
    assert (preview["total"], preview["hosts"], preview["held"], preview["confirm"]) == (3, 3, 0, True)
    assert preview["forecast"] == [{"outcome": "moved", "number": 3, "held": False, "text": "it is changed"}]
    assert preview["steps"][0] == {
        **{"host": "cmp0", "outcome": "moved", "text": "it is changed"},
        **{"generation": 0, "devices": 1, "held": 0},
    }
    dry = get_body(post_rollout(ask, **DISABLE_EVERYWHERE, dry_run=True), 200)
    for draft in Rollout.objects.all():
        run_rollout(draft)
        assert draft.state == "draft"
    assert not Command.objects.exists() and not Event.objects.filter(action__startswith="rollout.").exists()
    for other in ({"enabled": True}, {"selector": {"name": "cmp*"}}, {"max_parallel": 100}, {"driver": "pci_driver"}):
        answer = post_rollout(ask, **(DISABLE_EVERYWHERE | {"token": dry["token"]} | other))
        get_error_message(answer, 409, "stale_preview")
    get_error_message(post_rollout(ask, "admin", **DISABLE_EVERYWHERE, token=dry["token"]), 409, "stale_preview")
    create_hosts(4)  # a host that comes later is not part of the set
    made = get_body(post_rollout(ask, **DISABLE_EVERYWHERE, token=dry["token"], reason="recall"), 202)
    assert (made["state"], made["total"], made["reason"]) == ("running", 3, "recall")
    get_error_message(post_rollout(ask, **DISABLE_EVERYWHERE, token=dry["token"]), 409, "stale_preview")
    run_rollout(Rollout.objects.get(uuid=made["uuid"]))
    assert Command.objects.count() == 3


@pytest.mark.slow
def test_a_host_whose_driver_was_changed_after_the_preview_fails_and_is_retried(ask: Ask) -> None:
    create_hosts(3)
    order = DISABLE_EVERYWHERE | {"stop_on_failure": False}
    preview = get_body(post_rollout(ask, **order, dry_run=True), 200)
    alone = {"driver": "test_driver", "op": "update", "settings": {"a": 1}}
    get_body(post_rollout(ask, **alone, hosts=["cmp1"]), 202)
    answer_as_agent(Command.objects.get())
    made = get_body(post_rollout(ask, **order, token=preview["token"]), 202)
    get_error_message(ask(f"{made['url']}retry/", "operator", method="POST", data={}), 409, "conflict")
    run_rollout(Rollout.objects.get(uuid=made["uuid"]))
    for command in Command.objects.filter(ended_at=None).order_by("id"):
        answer_as_agent(command, *(("failed", "no space") if command.host.name == "cmp2" else ()))
    run_rollout(Rollout.objects.get(uuid=made["uuid"]))
    shown = get_body(ask(made["url"]))
    assert [(step["host"], step["state"]) for step in shown["steps"]] == [
        *(("cmp0", "done"), ("cmp1", "failed"), ("cmp2", "failed")),
    ]
    assert "is at generation 1 now, not 0: somebody changed it" in shown["steps"][1]["text"]
    retried = confirm_rollout(ask, path=f"/api/rollouts/{made['uuid']}/retry/")
    assert [step["host"] for step in retried["steps"]] == ["cmp1", "cmp2"]
    assert (retried["op"], retried["enabled"], retried["stop_on_failure"]) == ("update", False, False)
    run_rollout(Rollout.objects.get(uuid=retried["uuid"]))
    for command in Command.objects.filter(ended_at=None).order_by("id"):
        answer_as_agent(command)
    run_rollout(Rollout.objects.get(uuid=retried["uuid"]))
    assert get_body(ask(retried["url"]))["counts"]["done"] == 2
    answer = ask(f"/api/rollouts/{retried['uuid']}/retry/", "operator", method="POST", data={})
    assert "No host of this rollout has failed" in get_error_message(answer, 400)


def test_a_retry_whose_draft_is_confirmed_elsewhere_says_that_it_started_nothing(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_hosts(1)
    order = {"driver": "test_driver", "op": "update", "enabled": False, "hosts": ["cmp0"]}
    made = get_body(post_rollout(ask, **order), 202)
    answer_as_agent(Command.objects.get(), "failed", "no space")
    run_rollout(Rollout.objects.get())
    create_retry_draft = driver_rollouts.create_retry_draft

    def create_and_confirm(*values: Any) -> driver_rollouts.StoredDraft:
        """Create the draft, which the same caller confirms in the console at once."""
        draft = create_retry_draft(*values)
        assert driver_rollouts.confirm_rollout(draft.rollout, "from the console")
        return draft

    monkeypatch.setattr(driver_rollouts, "create_retry_draft", create_and_confirm)
    path, wish = f"/api/rollouts/{made['uuid']}/retry/", DriverWish.objects.get()
    answer = ask(path, "operator", method="POST", data={"generation": wish.generation, "reason": "again"})
    assert "started nothing" in get_error_message(answer, 409, "conflict")
    assert Rollout.objects.get(state="running").reason == "from the console"


@pytest.mark.parametrize("host_count", [2, 5])
def test_a_preview_forecasts_all_hosts_once(ask: Ask, host_count: int) -> None:
    """The forecast that is shown is the one that is stored with the draft."""
    create_hosts(host_count)
    hosts = [f"cmp{number}" for number in range(host_count)]
    order = {"driver": "test_driver", "op": "update", "enabled": False, "hosts": hosts, "dry_run": True}
    with CaptureQueriesContext(connection) as captured:
        preview = get_body(post_rollout(ask, **order), 200)
    assert len(preview["steps"]) == host_count
    reads = [query["sql"] for query in captured if 'FROM "accelerators_rolloutstep"' in query["sql"]]
    assert len(reads) == 1, reads


def test_the_preview_says_where_the_change_would_be_refused_or_changes_nothing(ask: Ask, fill: Fill) -> None:
    fill(20)
    create_hosts(3)  # cmp0 and cmp1 have held devices of pci_driver; cmp2 has none
    order = {"driver": "pci_driver", "op": "uninstall", "hosts": ["cmp0", "cmp1", "cmp2"]}
    preview = get_body(post_rollout(ask, **order, dry_run=True), 200)
    assert preview["counts"] == {"moved": 0, "unchanged": 1, "refused": 2} and preview["held"] > 0
    assert [(one["outcome"], one["text"]) for one in preview["steps"]] == [
        *(("refused", "one of its devices is held"), ("refused", "one of its devices is held")),
        ("unchanged", "it is not installed there"),
    ]
    preview = get_body(post_rollout(ask, **(DISABLE_EVERYWHERE | {"selector": {"name": "cmp2"}}), dry_run=True), 200)
    assert preview["confirm"] is False


def test_drafts_are_deleted_after_a_day(ask: Ask) -> None:
    create_hosts(2)
    get_body(post_rollout(ask, **DISABLE_EVERYWHERE), 409)
    assert not driver_rollouts.delete_oldest_ended_rollout()
    assert driver_rollouts.delete_oldest_ended_rollout(datetime.now(UTC) + timedelta(days=2))
    assert not Rollout.objects.exists()
