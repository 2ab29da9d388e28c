"""Test that a driver rollout does not wait for agents that are absent: it fails there at once, with the reason."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource, RolloutOp
from accelerators.models import Command, DriverWish, Host
from accelerators.workflows import driver_rollouts, rollout_previews
from accelerators.workflows.driver_config import DriverChange
from accelerators.workflows.driver_rollouts import RolloutPace
from agents.models import Agent, Lease
from drivers.inventory import DriverReport
from tests.support.reports import apply_report, get_or_create_host

pytestmark = pytest.mark.django_db
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
INSTALL = DriverChange(RolloutOp.INSTALL, "test_driver")
REASONS = {
    "barred": "the agent of {} may not connect (revoked): admit it, or let it join again",
    "down": "the agent of {} is down: start it, then try again",
    "never-joined": "no agent has joined for {}: let it join with a join token, then try again",
    "old": "the agent of {} (release 0.0.9) accepts no commands: update it",
}


@pytest.fixture
def hosts() -> list[Host]:
    """Return five hosts: the agent of one is up, one has none, and those of the others take no commands."""
    now = datetime.now(UTC)
    for name in ("barred", "down", "never-joined", "old", "up"):
        host = get_or_create_host(name)
        apply_report(host, DriverReport("test_driver", state="absent"))
        if name != "never-joined":
            barred, ops = "revoked" if name == "barred" else "", "" if name == "old" else "configure"
            Agent.objects.create(host=host, public_key=name, barred=barred, ops=ops, version="0.0.9")
            Lease.objects.create(host=host, seen_at=now - timedelta(hours=name == "down"))
    return list(Host.objects.order_by("name"))


def test_the_preview_and_the_result_of_a_rollout_name_at_once_why_an_agent_takes_no_command(hosts: list[Host]) -> None:
    pace = RolloutPace(stop_on_failure=False)
    draft = driver_rollouts.start_rollout(INSTALL, hosts, OLGA, pace=pace, source=EventSource.PERSON, is_draft=True)
    forecasts = {one.host: (str(one.outcome), one.text) for one in rollout_previews.preview_rollout(draft).hosts}
    refused = {name: ("refused", text.format("the host")) for name, text in REASONS.items()}
    assert forecasts == refused | {"up": ("moved", "it is installed")}
    assert driver_rollouts.confirm_rollout(draft, "")
    while driver_rollouts.advance_oldest_rollout():
        pass
    states = {step.host_name: (step.state, step.text) for step in draft.steps.all()}
    assert states.pop("up") == ("ordered", "")
    for name, text in REASONS.items():
        expected = text.format(name)
        assert states[name] == ("failed", f"{expected[0].upper()}{expected[1:]}.")
    assert Command.objects.get().host.name == "up", "no other host has got a command"
    assert [wish.host.name for wish in DriverWish.objects.all()] == ["up"]


def test_a_change_on_one_host_whose_agent_is_down_is_refused(hosts: list[Host]) -> None:
    (down,) = (host for host in hosts if host.name == "down")
    with pytest.raises(RefusedError, match="The agent of down is down: start it"):
        driver_rollouts.start_rollout(INSTALL, [down], OLGA, source=EventSource.PERSON)
    assert not DriverWish.objects.exists() and not Command.objects.exists()
