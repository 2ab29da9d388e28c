"""The job `placement`: bring the providers in Placement in step with changed hosts.

Intents of the kind `provider` wake it.

There is one intent per host. Several hosts are processed in parallel, on threads that do not use the database. While
Placement is away, all intents back off together; a host without a compute provider waits alone. Where agents write
(`writer_election`), the conductor only reads: it sends the differences to the host's agent as a command and looks again
when the command has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.conf import settings

from accelerators import conductor, outbox
from accelerators.domain.states import Source
from accelerators.models import Host, Intent
from accelerators.requests import binding
from accelerators.runtime import jobs
from placement_sync import mapping
from placement_sync.client import Placement, PlacementConflictError, PlacementRejectedError, PlacementUnavailableError
from placement_sync.cloud import session
from placement_sync.jobs import repository, writer_election
from placement_sync.jobs.writer_election import JOB, Turn
from placement_sync.sync import Outcome, ProviderMissingError, bring

KIND = "provider"
AT_ONCE = 8
"""Hosts that are processed at the same time."""
BATCH = 64
AT_IT = "its agent is writing", 5.0
"""Text and retry interval in seconds for a host whose agent has an open command. The end of the command normally wakes
the job sooner.
"""
WAITING_S = 30.0
"""Retry interval for a host whose compute provider does not exist yet, in seconds."""
SWEEP_S = 300.0
"""A host is looked at again after this time without a look, in seconds: somebody else may have changed Placement."""

NOT_LOOKED_AT = """
SELECT h.id FROM accelerators_host h LEFT JOIN placement_sync_tree t ON t.host_id = h.id
WHERE coalesce(t.looked_at, '-infinity') < statement_timestamp() - make_interval(secs => %s)
  AND (t.host_id IS NOT NULL OR EXISTS (SELECT FROM accelerators_device d
    JOIN accelerators_deployable p ON p.device_id = d.id WHERE d.host_id = h.id AND p.rp_uuid IS NOT NULL))
  AND NOT EXISTS (SELECT FROM accelerators_intent i WHERE i.kind = 'provider' AND i.key = h.uuid::text)
ORDER BY h.id LIMIT %s
"""

Ended = Outcome | Exception


def run() -> None:
    """Run the job."""
    jobs.run_outside_transaction(JOB, step)


def step() -> bool:
    """Process one batch of intents; return True if there may be more."""
    if (there := session(settings.KEYS.placement_endpoint)) is None:
        return False
    _look_again()
    due = outbox.due(KIND, BATCH)
    hosts = {str(host.uuid): host for host in Host.objects.filter(uuid__in=[intent.key for intent in due])}
    outbox.done([intent for intent in due if intent.key not in hosts])
    turns = writer_election.turns({hosts[one.key].id: "command" in one.payload for one in due if one.key in hosts})
    wanted = []
    for intent in due:
        if intent.key in hosts and turns[hosts[intent.key].id] is Turn.WAIT:
            outbox.waits(intent, *AT_IT)
        elif intent.key in hosts:
            wanted.append(intent)
    looks = [id for id, turn in turns.items() if turn is Turn.AGENT]
    away: PlacementUnavailableError | None = None
    for intent, outcome in zip(wanted, _brought(there, [hosts[one.key] for one in wanted], looks), strict=True):
        host = hosts[intent.key]
        if isinstance(outcome, Outcome) and host.id in looks and outcome.writes:
            with conductor.writing():
                number = writer_election.tell(host, outcome)
                outbox.waits(intent, AT_IT[0], AT_IT[1] if number else 0.0, command=number)
        elif isinstance(outcome, Outcome):
            with conductor.writing():
                repository.keep(host, outcome)
                outbox.done([intent])
            _bind_programmed(intent.key)
        elif isinstance(outcome, PlacementUnavailableError):
            away = outcome
        else:
            outbox.failed([intent], str(outcome), WAITING_S if isinstance(outcome, ProviderMissingError) else None)
    if away is not None:
        _wait_together(str(away))
        return False
    return len(due) == BATCH


class AgentWritesError(Exception):
    """The host's agent writes for this host. The job sends it what differs."""


def sync_hosts(cloud: Any, hosts: Sequence[Host], dry_run: bool = False) -> list[Ended]:
    """Synchronize these hosts now, for a person who asked for it; return the results in the order of `hosts`.

    With `dry_run` nothing is written. Otherwise, where an agent writes, the conductor raises an intent instead, and the
    result is AgentWritesError.
    """
    turns = {} if dry_run else writer_election.turns(dict.fromkeys((host.id for host in hosts), False))
    theirs = [host for host in hosts if turns.get(host.id, Turn.CONDUCTOR) is not Turn.CONDUCTOR]
    ours = [host for host in hosts if host not in theirs]
    conductor.providers_changed(theirs)
    left: dict[int, Ended] = {
        host.id: AgentWritesError("its agent writes for this host and is sent the differences") for host in theirs
    }
    looks = [host.id for host in ours] if dry_run else ()
    came = dict(zip((host.id for host in ours), _brought(cloud, ours, looks), strict=True)) | left
    return [came[host.id] for host in hosts]


def _brought(cloud: Any, hosts: Sequence[Host], looks: Collection[int] = ()) -> list[Ended]:
    """Synchronize the hosts in parallel and return the results in their order; for the host ids in `dry_run_hosts`, a
    dry run.

    After one host could not reach Placement, the others are not tried and get the same error.
    """
    words: set[str] = set()
    gone: list[PlacementUnavailableError] = []

    def one(host: Host, *known: Any) -> Ended:
        if gone:
            return gone[0]
        placement = Placement(cloud, settings.KEYS.placement_endpoint, words=words)
        parts, written, root = known
        desired, problems = mapping.desired(parts)
        try:
            outcome = bring(placement, host.name, desired, written, root, dry_run=host.id in looks)
        except PlacementUnavailableError as away:
            gone.append(away)
            return away
        except (ProviderMissingError, PlacementConflictError, PlacementRejectedError) as error:
            return error
        outcome.problems += problems
        return outcome

    loaded = [(host, repository.parts(host), repository.written(host), repository.root(host)) for host in hosts]
    if len(loaded) == 1:
        return [one(*loaded[0])]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="placement") as threads:
        return list(threads.map(lambda known: one(*known), loaded))


def _bind_programmed(host: str) -> None:
    """Move the requests that waited for this host's programming to Bound, since Placement now shows the result.

    Does nothing if the host has another `provider` intent meanwhile; then the next synchronization does it.
    """
    waiting = Intent.objects.filter(kind=binding.PROGRAMMED, payload__host=host)
    with conductor.writing():
        requests = list(waiting.values_list("key", flat=True))
        if requests and not Intent.objects.filter(kind=KIND, key=host).exists():
            ends = [binding.End(request) for request in binding.waiting(requests, [], [])]
            binding.resolve(ends, Source.SYSTEM, JOB)
            waiting.filter(key__in=requests).delete()


def _look_again() -> None:
    """Raise an intent for up to INTENT_BATCH hosts that were not looked at for SWEEP_S."""
    with conductor.writing():
        found = conductor.cursor().execute(NOT_LOOKED_AT, [SWEEP_S, BATCH]).fetchall()
        if found:
            conductor.providers_changed(Host.objects.filter(id__in=[id for (id,) in found]))


def _wait_together(error: str) -> None:
    """Record the failure for all due intents, so that they back off together while Placement is away."""
    while due := outbox.due(KIND, 1000):
        outbox.failed(due, error)
