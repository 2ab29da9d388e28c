"""The job `placement`: bring the providers in Placement in step with changed hosts.

Intents of the kind `provider` wake it.

There is one intent per host. Several hosts are processed in parallel, on threads that do not use the database. While
Placement is away, all intents back off together; a host without a compute provider waits alone. Where agents write
(`writer_election`), the conductor only reads: it sends the differences to the host's agent as a command and looks again
when the command has ended.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db.models import CharField, Exists, OuterRef, Q
from django.db.models.functions import Cast, Now

from accelerators import conductor, outbox
from accelerators.domain.states import EventSource
from accelerators.models import Deployable, Host, Intent
from accelerators.requests import binding
from accelerators.runtime import jobs
from placement_sync import mapping
from placement_sync.apply_writes import ProviderMissingError, SyncOutcome, synchronize_host
from placement_sync.client import (
    PlacementClient,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
)
from placement_sync.cloud import get_cloud_session
from placement_sync.errors import PlacementSyncError
from placement_sync.jobs import repository, writer_election
from placement_sync.jobs.writer_election import JOB, WriteTurn

KIND = "provider"
MAX_PARALLEL_HOSTS = 8
"""Hosts that are processed at the same time."""
INTENT_BATCH = 64
AGENT_IS_WRITING = "its agent is writing", 5.0
"""Text and retry interval in seconds for a host whose agent has an open command. The end of the command normally wakes
the job sooner.
"""
PROVIDER_MISSING_RETRY_S = 30.0
"""Retry interval for a host whose compute provider does not exist yet, in seconds."""
SWEEP_S = 300.0
"""Seconds after which a host is compared with Placement again: somebody else may have changed Placement."""

BEGIN_DEADLINE_S, CALL_DEADLINE_S = 20.0, 40.0
"""Seconds after which a batch begins no further host, and after which it makes no further call to Placement. The
cluster kills a job after 60 s."""

SyncResult = SyncOutcome | Exception


def run() -> None:
    """Run the job `placement`: process due intents until none is left, or its time slice is over."""
    jobs.run_steps_outside_transaction(JOB, step)


def step() -> bool:
    """Process one batch of due intents; return True if there may be more.

    First raises intents for hosts that were not looked at for long. For a host whose agent writes, differences are sent
    to the agent as a command, and the intent is postponed. Every outcome is stored in a transaction of its own. Returns
    False if Placement cannot be reached, after all due intents were postponed. Does nothing if Placement is switched
    off or no cloud is configured.
    """
    if (cloud := get_cloud_session(settings.KEYS.placement_endpoint)) is None:
        return False
    _enqueue_hosts_to_sweep()
    due = outbox.load_due_intents(KIND, INTENT_BATCH)
    hosts = {str(host.uuid): host for host in Host.objects.filter(uuid__in=[intent.key for intent in due])}
    outbox.delete_done_intents([intent for intent in due if intent.key not in hosts])
    turns = writer_election.decide_turns(
        {hosts[one.key].id: "command" in one.payload for one in due if one.key in hosts}
    )
    intents = []
    for intent in due:
        if intent.key in hosts and turns[hosts[intent.key].id] is WriteTurn.WAIT:
            outbox.postpone_intent(intent, *AGENT_IS_WRITING)
        elif intent.key in hosts:
            intents.append(intent)
    dry_run_hosts = [id for id, turn in turns.items() if turn is WriteTurn.AGENT]
    outage: PlacementUnavailableError | None = None
    has_more = len(due) == INTENT_BATCH
    for intent, outcome in zip(
        intents,
        _synchronize_in_parallel(
            cloud, [hosts[one.key] for one in intents], dry_run_hosts, BEGIN_DEADLINE_S, CALL_DEADLINE_S
        ),
        strict=True,
    ):
        host = hosts[intent.key]
        if isinstance(outcome, SyncOutcome) and host.id in dry_run_hosts and outcome.writes:
            with conductor.writing():
                command_id = writer_election.delegate_writes(host, outcome)
                outbox.postpone_intent(
                    intent, AGENT_IS_WRITING[0], AGENT_IS_WRITING[1] if command_id else 0.0, command=command_id
                )
        elif isinstance(outcome, SyncOutcome):
            with conductor.writing():
                repository.store_outcome(host, outcome)
                outbox.delete_done_intents([intent])
            _bind_programmed_requests(intent.key)
        elif isinstance(outcome, NotBegunError):
            has_more = True  # its intent stays due
        elif isinstance(outcome, PlacementUnavailableError):
            outage = outcome
        else:
            outbox.record_failures(
                [intent], str(outcome), PROVIDER_MISSING_RETRY_S if isinstance(outcome, ProviderMissingError) else None
            )
    if outage is not None:
        _back_off_due_intents(str(outage))
        return False
    return has_more


class NotBegunError(PlacementSyncError):
    """There was no time left in this batch to begin with the host."""


class AgentWritesError(PlacementSyncError):
    """The conductor has written nothing for this host, because the host's agent writes to Placement.

    The job `placement` sends the agent a command if Placement differs from what is desired.
    """


def sync_hosts(
    cloud: Any, hosts: Sequence[Host], dry_run: bool = False, seconds: float = CALL_DEADLINE_S
) -> list[SyncResult]:
    """Synchronize these hosts now, for a person who asked for it; return the results in the order of `hosts`.

    A result is the outcome, which the caller has to store, or the error. With `dry_run` nothing is written. Otherwise,
    where an agent writes, the conductor raises an intent instead, and the result is AgentWritesError. After `seconds`
    no further call is made.
    """
    turns = {} if dry_run else writer_election.decide_turns(dict.fromkeys((host.id for host in hosts), False))
    agent_hosts = [host for host in hosts if turns.get(host.id, WriteTurn.CONDUCTOR) is not WriteTurn.CONDUCTOR]
    conductor_hosts = [host for host in hosts if host not in agent_hosts]
    conductor.raise_provider_intents(agent_hosts)
    delegated: dict[int, SyncResult] = {
        host.id: AgentWritesError("its agent writes for this host and is sent the differences") for host in agent_hosts
    }
    dry_run_hosts = [host.id for host in conductor_hosts] if dry_run else ()
    results = (
        dict(
            zip(
                (host.id for host in conductor_hosts),
                _synchronize_in_parallel(cloud, conductor_hosts, dry_run_hosts, seconds, seconds),
                strict=True,
            )
        )
        | delegated
    )
    return [results[host.id] for host in hosts]


def _synchronize_in_parallel(
    cloud: Any,
    hosts: Sequence[Host],
    dry_run_hosts: Collection[int],
    begin_s: float,
    call_s: float,
) -> list[SyncResult]:
    """Synchronize the hosts in parallel and return the results in the order of `hosts`.

    The desired and the written state are loaded from the database before; nothing is stored there. A host whose id is
    in `dry_run_hosts` gets only a dry run. When Placement is unavailable for one host, the hosts that have not begun
    are not tried and get the same error. After `begin_s` seconds no host is begun (NotBegunError), and after `call_s`
    no call is made: Placement then counts as unavailable.
    """
    began = time.monotonic()

    def refuse_late_call() -> None:
        """Raise PlacementUnavailableError if the time for calls is over."""
        if time.monotonic() - began > call_s:
            raise PlacementUnavailableError(f"Placement is too slow: the calls were not finished within {call_s:g} s")

    known_names: set[str] = set()
    outages: list[PlacementUnavailableError] = []

    def synchronize_one(host: Host, *loaded_state: Any) -> SyncResult:
        """Synchronize one host; `loaded_state` is what `repository` loaded: deployables, written records, root and
        foreign providers.

        Expected errors are returned. Uses no database, because it runs on threads.
        """
        if outages:
            return outages[0]
        if time.monotonic() - began > begin_s:
            return NotBegunError("there was no time left to begin")
        endpoint = settings.KEYS.placement_endpoint
        placement = PlacementClient(cloud, endpoint, before_call=refuse_late_call, known_names=known_names)
        parts, written, root, known_foreign = loaded_state
        desired, problems = mapping.compute_desired_providers(parts)
        try:
            outcome = synchronize_host(
                placement,
                host.name,
                desired,
                written,
                root,
                dry_run=host.id in dry_run_hosts,
                known_foreign=known_foreign,
            )
        except PlacementUnavailableError as away:
            outages.append(away)
            return away
        except (ProviderMissingError, PlacementConflictError, PlacementRejectedError) as error:
            return error
        outcome.problems += problems
        return outcome

    loaded = [
        (
            host,
            repository.load_deployables(host),
            repository.load_written(host),
            *repository.load_root_and_foreign(host),
        )
        for host in hosts
    ]
    if len(loaded) == 1:
        return [synchronize_one(*loaded[0])]
    with ThreadPoolExecutor(MAX_PARALLEL_HOSTS, thread_name_prefix="placement") as executor:
        return list(executor.map(lambda known: synchronize_one(*known), loaded))


def _bind_programmed_requests(host: str) -> None:
    """Move the requests that waited for this host's programming to Bound, since Placement now shows the result.

    `host` is the host's uuid. Locks the requests, and deletes the intents by which they waited.
    Does nothing if the host has another `provider` intent meanwhile; then the next synchronization does it.
    """
    intents = Intent.objects.filter(kind=binding.PROGRAMMED_INTENT, payload__host=host)
    with conductor.writing():
        requests = list(intents.values_list("key", flat=True))
        if requests and not Intent.objects.filter(kind=KIND, key=host).exists():
            ends = [binding.BindOutcome(request) for request in binding.lock_waiting_requests(requests, [], [])]
            binding.finish_binds(ends, EventSource.SYSTEM, JOB)
            intents.filter(key__in=requests).delete()


def _enqueue_hosts_to_sweep() -> None:
    """Raise an intent for up to INTENT_BATCH hosts that were not compared with Placement in the last SWEEP_S seconds.

    A host that was never compared counts only if it has providers. Hosts that have an intent already are left out.
    """
    looked_at_before = Q(placement__looked_at__lt=Now() - timedelta(seconds=SWEEP_S))
    providers = Deployable.objects.filter(device__host=OuterRef("pk"), rp_uuid__isnull=False)
    intents = Intent.objects.filter(kind=KIND, key=Cast(OuterRef("uuid"), CharField()))
    hosts = Host.objects.filter(looked_at_before | Q(placement=None) & Exists(providers), ~Exists(intents))
    with conductor.writing():
        conductor.raise_provider_intents(hosts.order_by("id")[:INTENT_BATCH])


def _back_off_due_intents(error: str) -> None:
    """Record the failure for all due `provider` intents, so that they back off together while Placement is away."""
    while due := outbox.load_due_intents(KIND, 1000):
        outbox.record_failures(due, error)
