"""Compute the state of agents: up, late or down by the age of the lease, or revoked or clone if the agent is barred."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Q

from accelerators.commands.command_queue import Obstacle
from accelerators.commands.placement_delegation import WriterStatus
from accelerators.domain.states import AgentState
from accelerators.models import Host
from accelerators.runtime import database_clock
from agents.key_revocation import explain_bar
from agents.models import Agent

LIVENESS_STATES = (AgentState.UP, AgentState.LATE, AgentState.DOWN)
"""The states of an agent that may connect."""
MIN_LATE_S = 3.0
"""Seconds for which an agent is late at least. A heartbeat, or the gateway's write of the leases, may come later than
planned; with very short heartbeats, an agent would otherwise be down at once."""


def compute_thresholds(now: datetime | None = None) -> tuple[datetime, datetime]:
    """Return two times: an agent is `up` if it was last heard at or after the first, `late` if it was last heard at or
    after the second, otherwise `down`.

    They are as long before `now` (default: the present time) as `get_late_after` and `get_down_after` say.
    """
    at = now or database_clock.now()
    return at - get_late_after(), at - get_down_after()


def is_up(last_heard: datetime | None, now: datetime) -> bool:
    """Return whether an agent is up at the time `now` that was last heard at `last_heard` (None: never)."""
    return last_heard is not None and last_heard >= compute_thresholds(now)[0]


def get_late_after() -> timedelta:
    """Return the age of a lease after which its agent is late.

    The lease of a connected agent becomes as old as one heartbeat plus the interval at which gateways write leases:
    the last heartbeat before a write may be one interval of heartbeats old, and the next write is one interval later.
    """
    return timedelta(seconds=settings.KEYS.beat_s + settings.KEYS.lease_flush_s)


def get_down_after() -> timedelta:
    """Return the age of a lease after which its agent is down, and the job `leases` marks its host as stale.

    An agent is late for one heartbeat, and for MIN_LATE_S at least, before it is down. So it has missed two heartbeats:
    one is missing when it becomes late.
    """
    return get_late_after() + timedelta(seconds=max(settings.KEYS.beat_s, MIN_LATE_S))


def build_liveness_condition(state: str, lease_path: str = "") -> Q:
    """Return the query condition for the state up, late or down; an agent that was never heard is down.

    Bars are not considered; `build_state_condition` does that.

    `lease_path` is the lookup path to the lease's `seen_at`, from Agent if it is ''.
    """
    path = lease_path or "host__lease__seen_at"
    up, down = compute_thresholds()
    if state == "up":
        return Q(**{f"{path}__gte": up})
    if state == "late":
        return Q(**{f"{path}__lt": up, f"{path}__gte": down})
    return Q(**{f"{path}__lt": down}) | Q(**{f"{path}__isnull": True})


def build_state_condition(state: str) -> Q:
    """Return the query condition on Agent for an `AgentState`; a barred agent is never up, late or down."""
    return Q(barred="") & build_liveness_condition(state) if state in LIVENESS_STATES else Q(barred=state)


def get_last_heard(agent: Agent) -> datetime | None:
    """Return when the agent was last heard, None if never. Runs one query per agent, unless `host__lease` was loaded
    with select_related.
    """
    lease = getattr(agent.host, "lease", None)
    return lease.seen_at if lease else None


def get_agent_state(agent: Agent) -> AgentState:
    """Return the agent's state: revoked or clone if it is barred, else up, late or down by the age of its lease.

    Costs as many queries as `get_last_heard`.
    """
    if agent.barred:
        return AgentState(agent.barred)
    last_heard = get_last_heard(agent)
    up, down = compute_thresholds()
    if last_heard is None or last_heard < down:
        return AgentState.DOWN
    return AgentState.LATE if last_heard < up else AgentState.UP


def explain_absence(host: Host, agent: Agent | None) -> Obstacle | None:
    """Return why the host's agent cannot be reached, with what helps; None if it is up or late.

    `agent` is None if none has joined. The obstacle may pass by itself only if the agent is down; a command may wait
    for an agent that is down or has not joined. Costs as many queries as `get_last_heard`.
    """
    if host.removing_since:  # its agent is revoked, and none can join
        remedy = "wait until it is gone, or cancel its removal"
        return Obstacle(f"host {host.name} is being removed: {remedy}", f"it is being removed: {remedy}")
    if agent is None:
        remedy = "let it join with a join token"
        waiting_text = f"no agent has joined for it: {remedy}"
        texts = (f"no agent has joined for {host.name}: {remedy}, then try again", f"{waiting_text}, then try again")
        return Obstacle(*texts, waiting_text=waiting_text)
    if agent.barred:
        bar = agent.barred, agent.barred_reason
        return Obstacle(explain_bar(*bar, host.name), explain_bar(*bar, ""))
    if get_agent_state(agent) != AgentState.DOWN:
        return None
    remedy = "is down: start it"
    texts = (f"the agent of {host.name} {remedy}, then try again", f"its agent {remedy}, then try again")
    return Obstacle(*texts, may_pass=True, waiting_text=f"its agent {remedy}")


def get_writer_statuses(hosts: Collection[int]) -> dict[int, WriterStatus]:
    """Return the WriterStatus of each of these hosts, by its id: why its agent cannot write to Placement, and whether
    the agent has been silent for so long that it is down.

    Hosts without an agent are left out. One query.
    """
    agents = Agent.objects.filter(host__in=hosts).order_by().select_related("host__lease")
    return {agent.host_id: WriterStatus(explain_cannot_write(agent), _is_silent(agent)) for agent in agents}


def _is_silent(agent: Agent) -> bool:
    """Return whether the agent was never heard, or not for so long that it is down."""
    last_heard = get_last_heard(agent)
    return last_heard is None or last_heard < compute_thresholds()[1]


def explain_cannot_write(agent: Agent) -> str:
    """Return why the agent cannot write to Placement now, '' if it can."""
    if agent.barred:
        return explain_bar(agent.barred, agent.barred_reason, "")
    if _is_silent(agent):
        return "its agent is down"
    if agent.writes is None:
        return f"its agent (release {agent.version or 'unknown'}) does not support Placement writes: update it"
    return agent.writes


def get_state_since(agent: Agent) -> datetime | None:
    """Return since when the agent is in its state, None if it was never heard.

    If it is barred, that is when its row last changed; if up, when it connected; otherwise when it was last heard.
    """
    if agent.barred:
        return agent.changed_at
    return agent.connected_at if get_agent_state(agent) == "up" else get_last_heard(agent)
