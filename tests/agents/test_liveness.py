"""Test when an agent is late or down, and that its host becomes stale at the same age of the lease."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from accelerators.models import Host
from accelerators.runtime import database_clock
from agents import liveness
from agents.gateway.leases import mark_stale_hosts
from agents.models import Agent, Lease
from cyborgweb.settings.keys import Keys
from tests.support.reports import get_or_create_host

SEEN_S = 30.0
"""Promise L1: how soon the silence of an agent is seen."""
WRITER_S, JOB_S = 1.0, 2.0
"""How much later than planned the gateway may write leases and wake the job, and how long the job may need."""
INTERVALS = [(8.0, 5.0, 13.0, 21.0), (1.0, 5.0, 6.0, 9.0), (1.0, 0.5, 1.5, 4.5), (0.2, 0.1, 0.3, 3.3)]


def set_intervals(settings: Any, beat_s: float, flush_s: float) -> None:
    settings.KEYS = replace(settings.KEYS, beat_s=beat_s, lease_flush_s=flush_s)


@pytest.mark.parametrize(("beat_s", "flush_s", "late_s", "down_s"), INTERVALS)
def test_an_agent_is_late_after_a_heartbeat_and_a_write_of_leases_and_down_after_one_more_heartbeat(
    settings: Any, beat_s: float, flush_s: float, late_s: float, down_s: float
) -> None:
    set_intervals(settings, beat_s, flush_s)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert liveness.compute_thresholds(now) == (now - timedelta(seconds=late_s), now - timedelta(seconds=down_s))


@pytest.mark.parametrize(("beat_s", "flush_s"), [one[:2] for one in INTERVALS])
def test_a_connected_agent_is_never_down_and_with_two_missed_heartbeats_it_is(
    settings: Any, beat_s: float, flush_s: float
) -> None:
    """The stored lease is oldest just before a write: the heartbeat before the last write was just before the next
    heartbeat, and the write comes late.
    """
    set_intervals(settings, beat_s, flush_s)
    assert timedelta(seconds=beat_s + flush_s + WRITER_S) < liveness.get_down_after()
    assert liveness.get_down_after() >= timedelta(seconds=2 * beat_s)


def test_L1_with_the_default_intervals_a_silent_host_is_stale_within_30_s() -> None:
    """The job that marks hosts as stale is woken after each write of leases."""
    assert liveness.get_down_after() + timedelta(seconds=Keys().lease_flush_s + WRITER_S + JOB_S) <= timedelta(
        seconds=SEEN_S
    )


@pytest.mark.django_db
@pytest.mark.parametrize(("age_s", "state"), [(1090, "up"), (1110, "late"), (2090, "late"), (2110, "down")])
def test_the_state_of_an_agent_its_filter_and_the_stale_mark_of_its_host_agree(
    settings: Any, age_s: float, state: str
) -> None:
    set_intervals(settings, 1000.0, 100.0)
    host = get_or_create_host()
    Agent.objects.create(host=host, public_key="k" * 43, writes="")
    Lease.objects.create(host=host, seen_at=database_clock.now() - timedelta(seconds=age_s))
    mark_stale_hosts()
    assert liveness.get_agent_state(Agent.objects.get()) == state
    found = [word for word in liveness.LIVENESS_STATES if Agent.objects.filter(liveness.build_state_condition(word))]
    assert found == [state]
    assert (Host.objects.get().stale_since is not None) == (state == "down")
    assert liveness.get_writer_statuses([host.pk])[host.pk].has_stopped_writing == (state == "down")
