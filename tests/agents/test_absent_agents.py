"""Test what driver rollouts and bulk commands do on hosts whose agents are absent or take no commands: a rollout waits
for one that may come back by itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.devices import partitioning
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import DrainTarget, EventSource, RolloutOp
from accelerators.models import Command, Device, DriverWish, Host, RolloutStep
from accelerators.runtime import database_clock
from accelerators.workflows import bulk_actions, bulk_commands, driver_rollouts, rollout_previews
from accelerators.workflows.driver_config import DriverChange
from accelerators.workflows.driver_rollouts import RolloutPace
from agents import authentication, key_revocation
from agents.models import Agent, Lease
from drivers.inventory import DriverReport
from tests.accelerators.api.own.test_units import build_divisible_card
from tests.support.reports import apply_report, get_or_create_host, make_driver_report

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


@pytest.mark.parametrize("op", bulk_commands.BULK_OPS)
def test_the_preview_and_the_result_of_a_bulk_command_refuse_devices_whose_agent_takes_no_commands(op: str) -> None:
    acts = " ".join(bulk_commands.BULK_OPS)
    for name in ("new", "old"):
        host = get_or_create_host(name)
        apply_report(
            host, make_driver_report(build_divisible_card(1, 2, acts=acts), build_divisible_card(2, 2, acts=acts))
        )
        Agent.objects.create(host=host, public_key=name, ops="" if name == "old" else acts, version="0.0.9")
    change = {"units": 0, "layout": {"vfs": "8"}, "generation": None} if op == bulk_commands.PARTITION else None
    draft = bulk_actions.create_draft(op, DrainTarget.MAINTENANCE, Device.objects.all(), OLGA, arguments=change)
    with CaptureQueriesContext(connection) as captured:
        forecasts = bulk_actions.forecast_bulk(draft)
    assert len(captured) == 3, "one for the devices, one for the hosts, one for the agents"
    assert [(one.outcome, one.number) for one in forecasts] == [("moved", 2), ("refused", 2)]
    assert forecasts[1].text == "the agent of its host accepts no commands"
    first = {item.pk: forecast.outcome for item, forecast in bulk_actions.forecast_first_items(draft, 10)}
    if op == bulk_commands.PARTITION:
        change_of_old = partitioning.PartitionChange.from_arguments(change or {})
        single, _ = bulk_actions.forecast_unit_change(change_of_old, Device.objects.filter(host__name="old")[0])
        assert single.outcome == "refused"
    bulk_actions.confirm_draft(draft, "", held_too=True)
    assert {item.pk: item.outcome for item in draft.items.all()} == first
    refused = set(draft.items.filter(host="old").values_list("outcome", "text"))
    assert refused == {("refused", "The agent of old (release 0.0.9) accepts no commands: update it.")}


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
