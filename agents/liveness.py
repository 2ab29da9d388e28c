"""Compute the state of agents: up, late or down by the age of the lease, or revoked or clone if the agent is barred."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db.models import Q

from accelerators.commands.placement_delegation import WriterStatus
from agents.models import Agent, Bar

LIVENESS = ("up", "late", "down")
WORDS = (*LIVENESS, Bar.REVOKED.value, Bar.CLONE.value)
"""All states of an agent."""


def limits(now: datetime | None = None) -> tuple[datetime, datetime]:
    """Return two times: an agent heard since the first is up, since the second late, otherwise down.

    An age of one heartbeat plus the interval of lease flushes is normal, so it is up. An agent is down at the same age
    at which the job `leases` marks its host as stale.
    """
    beat, flush = settings.KEYS.beat_s, settings.KEYS.lease_flush_s
    down = 2 * beat + 2
    at = now or datetime.now(UTC)
    return at - timedelta(seconds=min(beat + flush, down)), at - timedelta(seconds=down)


def where(word: str, lease: str = "") -> Q:
    """Return the query condition for up, late or down; `lease_path` is the lookup path to the lease's `seen_at`."""
    path = lease or "host__lease__seen_at"
    up, down = limits()
    if word == "up":
        return Q(**{f"{path}__gte": up})
    if word == "late":
        return Q(**{f"{path}__lt": up, f"{path}__gte": down})
    return Q(**{f"{path}__lt": down}) | Q(**{f"{path}__isnull": True})


def standing(word: str) -> Q:
    """Return the query condition on Agent for any of AGENT_STATES."""
    return Q(barred="") & where(word) if word in LIVENESS else Q(barred=word)


def seen_at(agent: Agent) -> datetime | None:
    """Return when the agent was last heard, None if never. A query each unless `host__lease` was selected."""
    lease = getattr(agent.host, "lease", None)
    return lease.seen_at if lease else None


def word_of(agent: Agent) -> str:
    """Return the agent's state, one of AGENT_STATES."""
    if agent.barred:
        return agent.barred
    seen = seen_at(agent)
    up, down = limits()
    return "down" if seen is None or seen < down else "late" if seen < up else "up"


def hands(hosts: Collection[int]) -> dict[int, WriterStatus]:
    """Return for each of these hosts why its agent cannot write to Placement, if so, and whether it is silent.

    Hosts without an agent are left out. One query.
    """
    found = Agent.objects.filter(host__in=hosts).order_by().select_related("host__lease")
    return {agent.host_id: WriterStatus(lacks(agent), _is_silent(agent)) for agent in found}


def _is_silent(agent: Agent) -> bool:
    """Return whether the agent was never heard, or not for so long that it is down."""
    seen = seen_at(agent)
    return seen is None or seen < limits()[1]


def lacks(agent: Agent) -> str:
    """Return why the agent cannot write to Placement now, '' if it can."""
    if agent.barred:
        return f"its agent may not connect: {agent.barred}"
    if _is_silent(agent):
        return "its agent is down"
    if agent.writes is None:
        return f"its agent (release {agent.version or 'unknown'}) does not support Placement writes: update it"
    return agent.writes


def since(agent: Agent) -> datetime | None:
    """Return since when the agent is in its state, None if it was never heard.

    If barred, that is when its row last changed; if up, when it connected; otherwise when it was last heard.
    """
    if agent.barred:
        return agent.changed_at
    return agent.connected_at if word_of(agent) == "up" else seen_at(agent)
