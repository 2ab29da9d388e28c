"""Test what driver rollouts and bulk commands do on hosts whose agents are absent or take no commands: a rollout waits
for one that may come back by itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import Obstacle
from accelerators.devices import admission_rules, partitioning
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import DrainTarget, EventSource, RolloutOp
from accelerators.models import Bulk, Command, Device, DriverWish, Host, RolloutStep
from accelerators.runtime import database_clock
from accelerators.workflows import bulk_actions, bulk_admission, bulk_commands, driver_rollouts, rollout_previews
from accelerators.workflows.driver_config import DriverChange
from accelerators.workflows.driver_rollouts import RolloutPace
from agents import authentication, key_revocation
from agents.models import Agent, Lease
from drivers.inventory import DriverReport
from tests.accelerators.api.own.test_units import build_divisible_card
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
INSTALL = DriverChange(RolloutOp.INSTALL, "test_driver")
REASONS = {
    "barred": "its agent was revoked (by olga): to have it back, make a token with `manage.py join_token HOST`",
    "down": "its agent is down: start it, then try again",
    "never-joined": "no agent has joined for it: let it join with a join token, then try again",
    "old": "its agent (release 0.0.9) accepts no commands: update it",
}


@pytest.fixture
def hosts() -> list[Host]:
    """Return five hosts: the agent of one is up, one has none, and those of the others take no commands."""
    now = datetime.now(UTC)
    for name in ("barred", "down", "never-joined", "old", "up"):
        host = get_or_create_host(name)
        apply_report(host, DriverReport("test_driver", state="absent"))
        if name != "never-joined":
            ops = "" if name == "old" else "configure"
            agent = Agent.objects.create(host=host, public_key=name, ops=ops, version="0.0.9")
            if name == "barred":
                key_revocation.revoke_agent(agent, "olga", "")
            Lease.objects.create(host=host, seen_at=now - timedelta(hours=name == "down"))
    return list(Host.objects.order_by("name"))


def test_the_preview_and_the_result_of_a_rollout_name_at_once_why_an_agent_takes_no_command(hosts: list[Host]) -> None:
    pace = RolloutPace(max_parallel=1)
    draft = driver_rollouts.store_draft(INSTALL, hosts, OLGA, pace=pace, source=EventSource.PERSON).rollout
    forecasts = {one.host: (str(one.outcome), one.text) for one in rollout_previews.preview_rollout(draft).hosts}
    refused = {name: ("refused", text) for name, text in REASONS.items()}
    assert forecasts == refused | {"up": ("moved", "it is installed")}
    assert driver_rollouts.confirm_rollout(draft, "")
    while driver_rollouts.advance_oldest_rollout():
        pass
    states = {step.host_name: (step.state, step.text) for step in draft.steps.all()}
    assert states.pop("up") == ("ordered", "")
    for name, text in REASONS.items():
        expected = text.replace("its agent", f"the agent of {name}").replace("for it:", f"for {name}:")
        expected = expected.replace("HOST", name)
        assert states[name] == ("skipped", f"{expected[0].upper()}{expected[1:]}.")
    draft.refresh_from_db()
    assert draft.state == "running", "a refusal that the preview has shown does not stop the rollout"
    assert Command.objects.get().host.name == "up", "no other host has got a command"
    assert [wish.host.name for wish in DriverWish.objects.all()] == ["up"]


def test_a_change_on_one_host_whose_agent_is_down_is_refused(hosts: list[Host]) -> None:
    (down,) = (host for host in hosts if host.name == "down")
    with pytest.raises(RefusedError, match="The agent of down is down: start it"):
        driver_rollouts.start_rollout(INSTALL, [down], OLGA, source=EventSource.PERSON)
    assert not DriverWish.objects.exists() and not Command.objects.exists()


@pytest.mark.parametrize("name", ["a", "n", "agent", "the"])
def test_the_preview_does_not_cut_the_name_of_a_host_out_of_other_words(name: str) -> None:
    host = get_or_create_host(name)
    apply_report(host, DriverReport("test_driver", state="absent"))
    update = DriverChange(RolloutOp.UPDATE, "test_driver", settings={})
    for change, text in (
        (INSTALL, REASONS["never-joined"]),
        (update, "test_driver is not installed there: install it there first."),
    ):
        draft = driver_rollouts.store_draft(change, [host], OLGA, source=EventSource.PERSON).rollout
        assert [one.text for one in rollout_previews.preview_rollout(draft).hosts] == [text]


def explain_refused_order(host: Host) -> str:
    """Return the text with which a change of a driver on this host is refused."""
    with pytest.raises(RefusedError) as refused:
        driver_rollouts.start_rollout(INSTALL, [host], OLGA, source=EventSource.PERSON)
    return refused.value.text


def test_the_advice_for_a_host_whose_agent_is_barred_can_be_followed(hosts: list[Host]) -> None:
    barred, up = hosts[0], hosts[-1]
    assert "`manage.py join_token barred`" in (text := explain_refused_order(barred)) and "admit" not in text
    assert authentication.create_join_token("barred", address="wss://cyborg.example", hours=1, created_by="olga")
    agent = Agent.objects.get(host=up)
    identities = (key_revocation.ConnectionIdentity(f"10.0.0.{n}", f"boot{n}", n) for n in (1, 2))
    key_revocation.bar_cloned_key(up.pk, agent.public_key, *identities)
    assert "`manage.py agents --admit up`" in explain_refused_order(up)
    assert key_revocation.lift_clone_bar(agent, "olga")
    driver_rollouts.start_rollout(INSTALL, [up], OLGA, source=EventSource.PERSON)


@pytest.mark.parametrize("name", ["barred", "never-joined"])
def test_a_host_that_is_being_removed_is_not_told_to_join(hosts: list[Host], name: str) -> None:
    (host,) = (one for one in hosts if one.name == name)
    with conductor.writing():
        Host.objects.filter(pk=host.pk).update(removing_since=database_clock.now())
    host.refresh_from_db()
    expected = f"Host {name} is being removed: wait until it is gone, or cancel its removal."
    assert explain_refused_order(host) == expected
    (forecast,) = driver_rollouts.store_draft(INSTALL, [host], OLGA, source=EventSource.PERSON).preview.hosts
    assert forecast.text == "it is being removed: wait until it is gone, or cancel its removal"


def test_an_update_is_not_advised_where_it_cannot_help(hosts: list[Host]) -> None:
    (old,) = (one for one in hosts if one.name == "old")
    agent = Agent.objects.get(host=old)
    assert explain_refused_order(old) == "The agent of old (release 0.0.9) accepts no commands: update it."
    key_revocation.revoke_agent(agent, "olga", "")
    assert explain_refused_order(old).startswith("The agent of old was revoked (by olga)")
    with conductor.writing():
        Host.objects.filter(pk=old.pk).update(removing_since=database_clock.now())
    old.refresh_from_db()
    assert explain_refused_order(old).startswith("Host old is being removed")


def test_an_obstacle_for_which_a_command_may_wait_does_not_hide_that_of_another_check(
    hosts: list[Host],
) -> None:
    (down,) = (one for one in hosts if one.name == "down")
    closed = Obstacle("the rack of down is closed", "its rack is closed")
    with command_queue.REACH_CHECKS.replaced("rack", lambda hosts: {down.pk: closed}):
        for may_wait in (True, False):
            assert command_queue.explain_unreachable([down], may_wait=may_wait) == {down.pk: closed}


CAN_WAIT = {
    "down": "its agent is down: start it",
    "never-joined": "no agent has joined for it: let it join with a join token",
}
"""The hosts for whose agents a command can wait, each with what has to be done for the command."""


def draft_bulk_action(action: str) -> Bulk:
    """Store a bulk action on all devices as a draft."""
    change = {"units": 0, "layout": {"vfs": "8"}, "generation": None} if action == bulk_commands.PARTITION else None
    return bulk_actions.create_draft(action, DrainTarget.MAINTENANCE, Device.objects.all(), OLGA, arguments=change)


@pytest.mark.parametrize("op", bulk_commands.BULK_OPS)
def test_the_preview_of_a_bulk_command_says_on_which_hosts_the_agents_take_no_commands_and_the_result_agrees(
    hosts: list[Host], op: str
) -> None:
    acts = " ".join(bulk_commands.BULK_OPS)
    for host in hosts:
        cards = (build_divisible_card(1, 2, acts=acts), build_divisible_card(2, 2, acts=acts))
        apply_report(host, make_driver_report(*cards), seq=2)
    draft = draft_bulk_action(op)
    with CaptureQueriesContext(connection) as captured:
        forecasts = bulk_actions.forecast_bulk(draft)
    assert len(captured) == 3, "one for the devices, one for the hosts, one for the agents"
    expected = {f"{REASONS[name]} (host {name})": "refused" for name in ("barred", "old")}
    done = "the command is sent to its agent"
    if op == bulk_commands.PARTITION:
        done = "is divided again with vfs=8; it has 2 units now"
    expected |= {done: "moved"}
    for name, remedy in CAN_WAIT.items():
        placed = done if op == bulk_commands.PARTITION else "the command is placed"
        expected[f"{placed}; {remedy} within 60 seconds, or the command expires (host {name})"] = "moved"
    assert {one.text: one.outcome for one in forecasts} == expected
    assert {one.number for one in forecasts} == {2}
    first = {item.pk: forecast for item, forecast in bulk_actions.forecast_first_items(draft, 10)}
    assert {one.text: one.outcome for one in first.values()} == expected
    if op == bulk_commands.PARTITION:
        wanted = partitioning.PartitionChange.from_arguments(draft.arguments or {})
        singles = (bulk_actions.forecast_unit_change(wanted, device)[0] for device in Device.objects.all())
        assert {one.text: one.outcome for one in singles} == expected
    bulk_actions.confirm_draft(draft, "", held_too=True)
    assert {item.pk: item.outcome for item in draft.items.all()} == {pk: one.outcome for pk, one in first.items()}
    assert {command.host.name for command in Command.objects.all()} == {"up", *CAN_WAIT}, "these may come back"
    refused = set(draft.items.filter(host="old").values_list("outcome", "text"))
    assert refused == {("refused", "The agent of old (release 0.0.9) accepts no commands: update it.")}


def test_the_page_of_a_draft_looks_for_unreachable_agents_once(
    hosts: list[Host], admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_report(hosts[1], make_driver_report(make_card(1, acts="reset")), seq=2)
    draft, numbers = draft_bulk_action("reset"), list[int]()
    find_obstacles = command_queue.explain_unreachable
    monkeypatch.setattr(
        command_queue,
        "explain_unreachable",
        lambda hosts, **how: numbers.append(len(hosts)) or find_obstacles(hosts, **how),
    )
    page = admin_client.get(reverse("admin:accelerators_bulk_change", args=[draft.pk]), follow=True).content.decode()
    assert "its agent is down: start it within 60 seconds" in page and numbers == [1]


def test_the_preview_names_five_hosts_whose_agents_are_down_and_counts_the_others() -> None:
    for number in range(7):
        host = get_or_create_host(f"cmp{number}")
        apply_report(host, make_driver_report(make_card(1, acts="reset"), make_card(2, acts="reset")))
        Agent.objects.create(host=host, public_key=host.name, ops="reset")
    (forecast,) = bulk_actions.forecast_bulk(draft_bulk_action("reset"))
    assert forecast.number == 14
    assert forecast.text.endswith("or the command expires (hosts cmp0, cmp1, cmp2, cmp3, cmp4 and 2 more)")


def test_a_host_is_not_named_for_devices_that_are_refused_for_another_reason(hosts: list[Host]) -> None:
    apply_report(hosts[1], make_driver_report(make_card(1, acts="health")), seq=2)
    (forecast,) = bulk_actions.forecast_bulk(draft_bulk_action("reset"))
    assert forecast.text == "its driver does not support reset"


@pytest.mark.parametrize("action", [Action.ENABLE, bulk_admission.ADMIT])
def test_the_preview_of_devices_to_be_installed_says_on_which_hosts_the_agents_take_no_commands(
    hosts: list[Host], action: str
) -> None:
    for host in hosts:
        apply_report(host, make_driver_report(make_card(1, to_install="bind it"), make_card(2)), seq=2)
    admission_rules.create_rule({"name": "all", "action": "ready"}, OLGA)
    draft, ending = draft_bulk_action(action), " by rule all" if action == bulk_admission.ADMIT else ""
    forecasts = {one.text: (str(one.outcome), one.number) for one in bulk_actions.forecast_bulk(draft)}
    expected = {f"becomes ready{ending}": ("moved", 5), f"becomes installing{ending}": ("moved", 1)}
    for name, reason in REASONS.items():
        text, outcome = reason, "refused"
        if name in CAN_WAIT:
            text = f"becomes installing{ending}; {CAN_WAIT[name]} within 3600 seconds, or the command expires"
            outcome = "moved"
        expected[f"{text} (host {name})"] = (outcome, 1)
    assert forecasts == expected
    first = {item.pk: one for item, one in bulk_actions.forecast_first_items(draft, 10)}
    assert {one.text for one in first.values()} == expected.keys()
    if action is Action.ENABLE:
        singles = (bulk_actions.forecast_device(action, DrainTarget.MAINTENANCE, one) for one in Device.objects.all())
        assert {one.text for one in singles} == expected.keys()
    bulk_actions.confirm_draft(draft, "", held_too=True)
    assert {item.pk: item.outcome for item in draft.items.all()} == {pk: one.outcome for pk, one in first.items()}
    assert {command.host.name for command in Command.objects.filter(op="install")} == {"up", *CAN_WAIT}
    refused = set(draft.items.filter(host="old").exclude(why="").values_list("outcome", "why", "text"))
    assert refused == {("refused", "conflict", "The agent of old (release 0.0.9) accepts no commands: update it.")}
    states = set(Device.objects.filter(host__name__in=("old", "barred")).values_list("to_install", "state"))
    assert states == {("bind it", "inactive"), ("", "ready")}, "no device is busy or installing for an agent in vain"


def test_a_command_for_a_host_whose_agent_is_barred_is_refused_at_once(hosts: list[Host]) -> None:
    (barred,) = (one for one in hosts if one.name == "barred")
    apply_report(barred, make_driver_report(make_card(1, acts="health")), seq=2)
    with pytest.raises(RefusedError, match="The agent of barred was revoked"):
        command_queue.order_device_command("health", Device.objects.get().uuid, OLGA)
    with pytest.raises(RefusedError, match="The agent of barred was revoked"):
        command_queue.order_host_command("rescan", barred.uuid, OLGA)


def start_on_down_and_up(hosts: list[Host]) -> Callable[[], RolloutStep]:
    """Start a rollout on the host whose agent is down and on the one whose agent is up, without a preview. Return a
    function that runs the job after the pause of the first host, and returns the step of this host."""
    chosen = [host for host in hosts if host.name in ("down", "up")]
    rollout = driver_rollouts.start_rollout(INSTALL, chosen, OLGA, source=EventSource.PERSON)

    def run_after_pause() -> RolloutStep:
        with conductor.writing():
            rollout.steps.exclude(next_at=None).update(next_at=database_clock.now())
        driver_rollouts.run()
        return rollout.steps.get(host_name="down")

    return run_after_pause


def test_L2_a_rollout_waits_for_an_agent_that_comes_back_after_an_outage(hosts: list[Host]) -> None:
    run_after_pause = start_on_down_and_up(hosts)
    step = run_after_pause()
    assert (step.state, step.attempts) == ("waiting", 1) and "down" in step.text
    assert step.rollout.steps.get(host_name="up").state == "ordered", "the other host does not wait"
    Lease.objects.filter(host=step.host_id).update(seen_at=database_clock.now())
    step = run_after_pause()
    assert (step.state, step.text) == ("ordered", "")
    step.rollout.refresh_from_db()
    assert step.rollout.state == "running"


def test_a_rollout_waits_longer_after_each_attempt_and_fails_if_the_agent_stays_down(hosts: list[Host]) -> None:
    run_after_pause = start_on_down_and_up(hosts)
    pauses = []
    while (step := run_after_pause()).state == "waiting":
        assert step.next_at
        pauses.append(round((step.next_at - database_clock.now()).total_seconds()))
    assert pauses == pytest.approx([12, 24, 48, 60], abs=3)
    assert (step.state, step.attempts) == ("failed", 4) and "down" in step.text


def test_the_preview_says_that_a_refusal_which_arose_after_the_choice_may_stop_the_rollout(hosts: list[Host]) -> None:
    draft = driver_rollouts.store_draft(INSTALL, hosts, OLGA, source=EventSource.PERSON).rollout
    Agent.objects.filter(host__name="up").update(ops="")
    texts = {one.host: one.text for one in rollout_previews.preview_rollout(draft).hosts}
    assert [name for name, text in texts.items() if text.endswith("; the rollout may stop there")] == ["up"]
    Agent.objects.filter(host__name="down").update(ops="configure")
    Lease.objects.update(seen_at=database_clock.now())
    driver_rollouts.confirm_rollout(draft, "")
    driver_rollouts.run()
    assert draft.steps.get(host_name="down").state == "ordered", "its agent has come back"
    assert draft.steps.get(host_name="up").state == "failed"
