"""How an agent stands: up, late or down by when it was last heard; revoked or taken for a clone by decision.

Called by the console, the API and `manage.py agents`.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db.models import Q

from accelerators.commands.placement_delegation import Hand
from agents.models import Agent, Bar

LIVENESS = ("up", "late", "down")
WORDS = (*LIVENESS, Bar.REVOKED.value, Bar.CLONE.value)


def limits(now: datetime | None = None) -> tuple[datetime, datetime]:
    """Heard since the first moment: up. Since the second only: late. Earlier, or never: down.

    One beat, and what a gateway waits before it writes a lease, are normal. Down is when the watcher of leases makes
    the host stale.
    """
    beat, flush = settings.KEYS.beat_s, settings.KEYS.lease_flush_s
    down = 2 * beat + 2
    at = now or datetime.now(UTC)
    return at - timedelta(seconds=min(beat + flush, down)), at - timedelta(seconds=down)


def where(word: str, lease: str = "") -> Q:
    """The condition for up, late or down; `lease` is the path to the moment a lease was last renewed."""
    path = lease or "host__lease__seen_at"
    up, down = limits()
    if word == "up":
        return Q(**{f"{path}__gte": up})
    if word == "late":
        return Q(**{f"{path}__lt": up, f"{path}__gte": down})
    return Q(**{f"{path}__lt": down}) | Q(**{f"{path}__isnull": True})


def standing(word: str) -> Q:
    """The condition for any of WORDS on agents."""
    return Q(barred="") & where(word) if word in LIVENESS else Q(barred=word)


def seen_at(agent: Agent) -> datetime | None:
    """When it was last heard; None: never."""
    lease = getattr(agent.host, "lease", None)
    return lease.seen_at if lease else None


def word_of(agent: Agent) -> str:
    """One of WORDS."""
    if agent.barred:
        return agent.barred
    seen = seen_at(agent)
    up, down = limits()
    return "down" if seen is None or seen < down else "late" if seen < up else "up"


def hands(hosts: Collection[int]) -> dict[int, Hand]:
    """How the agents of these hosts stand who are to write to Placement; a host that has none is left out."""
    found = Agent.objects.filter(host__in=hosts).order_by().select_related("host__lease")
    return {agent.host_id: Hand(lacks(agent), _is_silent(agent)) for agent in found}


def _is_silent(agent: Agent) -> bool:
    seen = seen_at(agent)
    return seen is None or seen < limits()[1]


def lacks(agent: Agent) -> str:
    """Why it cannot write to Placement now, '' when it can."""
    if agent.barred:
        return f"its agent may not connect: {agent.barred}"
    if _is_silent(agent):
        return "its agent is down"
    if agent.writes is None:
        return f"its agent (release {agent.version or 'unknown'}) knows nothing of it: update it"
    return agent.writes


def since(agent: Agent) -> datetime | None:
    """Since when it stands so: barred, connected, or last heard."""
    if agent.barred:
        return agent.changed_at
    return agent.connected_at if word_of(agent) == "up" else seen_at(agent)
