"""Driver rollouts: apply one change of a driver to many hosts, a limited number at a time.

A rollout stops at the first failure if that is wanted. Its list of hosts is fixed when it starts. The job `rollouts`
makes the holder checks for one host, then places the order for it and marks the host's row in one transaction: wherever
a worker is killed, each host gets one order. For a single host the order is placed at once, and a refusal is raised to
the caller of `start_rollout`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypedDict

from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now

from accelerators import conductor, outbox, safety
from accelerators.commands import command_queue
from accelerators.domain import driver_status
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.generations import require_generation
from accelerators.domain.states import (
    CommandState,
    DeviceOutcome,
    EventSource,
    RolloutOp,
    RolloutState,
    RolloutStepState,
)
from accelerators.models import DriverWish, Host, Rollout, RolloutStep
from accelerators.models.drivers import ROLLOUT_IS_OPEN
from accelerators.runtime import database_clock, jobs
from accelerators.runtime.after_commit import call_after_commit
from accelerators.workflows import driver_config, driver_settings, rollout_previews
from accelerators.workflows.driver_config import ChangeOrigin, DriverChange, build_change
from accelerators.workflows.rollout_previews import RolloutPreview

ROLLOUTS_JOB = "rollouts"
MAX_ROLLOUT_HOSTS = 10_000
"""Maximum number of hosts of one rollout."""
DEFAULT_PARALLEL, MAX_PARALLEL = 5, 100
ROLLOUT_RETENTION = timedelta(days=90)
"""Ended rollouts are deleted after this time; their events stay."""
DRAFT_RETENTION = timedelta(days=1)
"""Drafts that nobody has confirmed are deleted after this time."""
AGENT_ATTEMPTS = 5
"""How often the order for a host is tried while its agent is down. With the pauses of HOLDER_CHECK_PAUSE, the agent has
144 s to come back: longer than agents need to connect again after the database or the conductor was away, and than
their leases need to be stored."""
HOLDER_CHECK_PAUSE = outbox.build_retry_pause(safety.HOLDER_CHECK_PAUSE_S, safety.LONGEST_HOLDER_CHECK_PAUSE_S)
_R, _S = RolloutState, RolloutStepState


class StoredDraft(NamedTuple):
    """A rollout that is stored as a draft, and its preview."""

    rollout: Rollout
    preview: RolloutPreview


@dataclass(frozen=True)
class RolloutPace:
    """The pace of a rollout: the number of hosts that are changed at the same time, and whether it stops after a
    failure."""

    max_parallel: int = DEFAULT_PARALLEL
    stop_on_failure: bool = True


class RolloutOptions(TypedDict):
    """The keyword arguments that `start_rollout` and `store_draft` have in common."""

    pace: RolloutPace
    reason: str
    source: EventSource
    generation: int | None


def select_hosts(names: Sequence[str] = (), selector: Mapping[str, Any] | None = None) -> list[Host]:
    """Return the hosts of these names, or those that a selector matches, sorted by name.

    A selector is `{"all": true}`, or has one or both of `driver` (hosts on which this driver runs or is wanted) and
    `name` (a pattern with * and ?). Raises RefusedError INVALID for an unknown name, an invalid selector, no host, or
    more than MAX_ROLLOUT_HOSTS.
    """
    if bool(names) == bool(selector):
        raise RefusedError(RefusalReason.INVALID, "Give either the names of the hosts (hosts) or a selector, not both.")
    if not selector:
        named_hosts = Host.objects.filter(name__in=set(names)).order_by("name")
        if unknown_names := sorted(set(names) - {host.name for host in named_hosts}):
            raise RefusedError(
                RefusalReason.INVALID, f"There is no host {', '.join(unknown_names)[:300]}; GET /api/hosts/ lists them."
            )
        return _check_host_count(list(named_hosts))
    driver, pattern, all_hosts = selector.get("driver"), selector.get("name"), selector.get("all")
    texts = [value for value in (driver, pattern) if value is not None]
    is_usable = all(isinstance(text, str) and 0 < len(text) <= 255 and "\0" not in text for text in texts)
    if selector.keys() - {"driver", "name", "all"} or all_hosts not in (None, True) or not is_usable:
        text = 'A selector is {"all": true}, or {"driver": "pci_driver"} and {"name": "cmp*"}, one or both.'
        raise RefusedError(RefusalReason.INVALID, text)
    hosts = [host for host in Host.objects.order_by("name") if not pattern or fnmatchcase(host.name, pattern)]
    if driver:
        hosts_with_wish = {
            *Host.objects.filter(wishes__driver=driver, wishes__installed=True).values_list("pk", flat=True)
        }
        hosts = [host for host in hosts if host.pk in hosts_with_wish or _is_driver_running(host, driver)]
    return _check_host_count(hosts)


def start_rollout(
    change: DriverChange,
    hosts: Sequence[Host],
    caller: Caller,
    *,
    pace: RolloutPace = RolloutPace(),
    reason: str = "",
    source: EventSource,
    generation: int | None = None,
) -> Rollout:
    """Start a rollout of `change` on these hosts and return it.

    Settings that the driver cannot use are refused here if they are checked here for all hosts; otherwise each host for
    which they are checked is refused alone. For a single host the order is placed when this returns; for more, the job
    `rollouts` places them. Raises RefusedError INVALID for a wrong change, reason or pace, and for a single host
    whatever `driver_config.order_driver_change` raises; then nothing is stored. `generation`, only for a single host,
    is the generation of the wanted configuration that the caller has seen.
    """
    reason = _check_rollout(change, hosts, pace, reason, generation)
    is_ordered_now = len(hosts) == 1
    answers = driver_config.ask_holders_for_change(hosts[0], change) if is_ordered_now else safety.NO_ANSWERS
    with conductor.writing():
        generations = {} if generation is None else {hosts[0].pk: generation}
        origin = ChangeOrigin(caller.name, reason, source)
        rollout, steps = _create_rollout(change, hosts, _R.RUNNING, origin, caller.user_id, pace, generations)
        _begin_rollout(rollout)
        if is_ordered_now:
            _order_host(rollout, steps[0], answers)
            _advance_rollout(rollout)
    return rollout


def store_draft(
    change: DriverChange,
    hosts: Sequence[Host],
    caller: Caller,
    *,
    pace: RolloutPace = RolloutPace(),
    reason: str = "",
    source: EventSource,
    generation: int | None = None,
) -> StoredDraft:
    """Store a rollout as a draft, which `confirm_rollout` starts, and return it with its preview.

    The generation of the driver's desired state and the foreseen refusal of each host are stored with it, so that a
    refusal which the preview shows does not stop the rollout later. Costs as many statements as the preview, and one
    for 1000 refusals. The arguments and refusals are those of `start_rollout`, but no order is placed.
    """
    reason = _check_rollout(change, hosts, pace, reason, generation)
    with conductor.writing():
        generations = _load_generations(change.driver, hosts) if generation is None else {hosts[0].pk: generation}
        origin = ChangeOrigin(caller.name, reason, source)
        rollout, steps = _create_rollout(change, hosts, _R.DRAFT, origin, caller.user_id, pace, generations)
        preview = rollout_previews.preview_new_draft(rollout, change)
        refused = [pair for pair in zip(steps, preview.hosts, strict=True) if pair[1].outcome == DeviceOutcome.REFUSED]
        for step, forecast in refused:
            step.text = forecast.text[:4096]
        RolloutStep.objects.bulk_update([step for step, _ in refused], ["text"], batch_size=1000)
    return StoredDraft(rollout, preview)


def _check_rollout(
    change: DriverChange, hosts: Sequence[Host], pace: RolloutPace, reason: str, generation: int | None
) -> str:
    """Return the reason of a rollout as it is stored. Raises RefusedError INVALID as `start_rollout` describes it."""
    driver_config.check_driver_change(change)
    is_checked_here = all(
        driver_settings.is_checked_here(change.driver, one.drivers.get(change.driver)) for one in hosts
    )
    if is_checked_here and change.settings_error:
        raise RefusedError(RefusalReason.INVALID, change.settings_error)
    if generation is not None and len(hosts) != 1:
        text = f"A generation is only for a single host; {len(hosts)} hosts are chosen."
        raise RefusedError(RefusalReason.INVALID, text)
    reason = command_queue.check_reason(reason)
    if not 1 <= pace.max_parallel <= MAX_PARALLEL:
        raise RefusedError(
            RefusalReason.INVALID, f"max_parallel, the number of hosts at a time, must be 1 to {MAX_PARALLEL}."
        )
    return reason


def _create_rollout(
    change: DriverChange,
    hosts: Sequence[Host],
    state: RolloutState,
    origin: ChangeOrigin,
    caller_id: str,
    pace: RolloutPace,
    generations: Mapping[int, int],
) -> tuple[Rollout, list[RolloutStep]]:
    """Store a rollout and its hosts; return it with its steps, in the order of the hosts. `generations` are those on
    which the change is based, by the id of the host."""
    rollout = Rollout.objects.create(
        op=change.op,
        driver=change.driver,
        enabled=change.enabled,
        settings=change.settings,
        edits={"set": change.edits.set, "unset": [*change.edits.unset]} if change.edits else None,
        max_parallel=pace.max_parallel,
        stop_on_failure=pace.stop_on_failure,
        total=len(hosts),
        state=state,
        actor=origin.actor[:255],
        caller_id=caller_id[:255],
        reason=origin.reason,
        request_id=request_id.get(),
        source=origin.source,
    )
    steps = [
        RolloutStep(rollout=rollout, host=host, host_name=host.name, generation=generations.get(host.pk))
        for host in hosts
    ]
    RolloutStep.objects.bulk_create(steps, batch_size=1000)
    return rollout, steps


def refuse_without_generation(driver: str, host: Host, generation: int | None) -> None:
    """Raise NoGenerationError if `generation` is None: the caller does not say on which generation of the driver's
    wanted configuration on this host a change is based."""
    if generation is None:
        present = _load_generations(driver, [host])[host.pk]
        require_generation(f"{driver} on {host.name}", present, None, [host.name])


def confirm_rollout(rollout: Rollout, reason: str) -> bool:
    """Start a rollout that is a draft; the job `rollouts` changes its hosts. Returns False if it is no draft any more.

    A host on which somebody has changed the driver since the draft was stored fails. Raises RefusedError INVALID for a
    reason that cannot be stored.
    """
    reason = command_queue.check_reason(reason)
    with conductor.writing():
        draft = Rollout.objects.select_for_update().filter(pk=rollout.pk, state=_R.DRAFT).first()
        if draft is None:
            return False
        draft.state, draft.reason, draft.request_id = _R.RUNNING.value, reason, request_id.get()
        draft.updated_at = database_clock.now()
        draft.save(update_fields=["state", "reason", "request_id", "updated_at"])
        _begin_rollout(draft)
    return True


def may_confirm(rollout: Rollout, caller: Caller) -> bool:
    """Return whether the caller is the one who chose the hosts of a draft; nobody else may confirm it."""
    return rollout.actor == caller.name[:255] and rollout.caller_id == caller.user_id[:255]


def find_only_host_to_retry(rollout: Rollout) -> Host | None:
    """Return the host of a rollout that has failed or was not begun if it is the only one, otherwise None."""
    steps = query_failed_steps(rollout).select_related("host")[:2]
    return steps[0].host if len(steps) == 1 else None


def create_retry_draft(
    rollout: Rollout, caller: Caller, source: EventSource, generation: int | None = None
) -> StoredDraft:
    """Store a draft of the same change for the hosts of an ended rollout that have failed or were not begun.

    `generation`, only for a single host, is that of the wanted configuration which the caller has seen.

    Raises RefusedError: CONFLICT if it has not ended, INVALID if no such host exists.
    """
    if rollout.ended_at is None:
        raise RefusedError(RefusalReason.CONFLICT, "The rollout has not ended yet: wait, or cancel it.")
    hosts = list(Host.objects.filter(pk__in=query_failed_steps(rollout).values("host")).order_by("name"))
    if not hosts:
        raise RefusedError(RefusalReason.INVALID, "No host of this rollout has failed and still exists.")
    pace = RolloutPace(rollout.max_parallel, rollout.stop_on_failure)
    return store_draft(build_change(rollout), hosts, caller, pace=pace, source=source, generation=generation)


def query_failed_steps(rollout: Rollout) -> QuerySet[RolloutStep]:
    """Return the steps of a rollout that have failed, or were not begun, and whose host still exists."""
    return rollout.steps.filter(state__in=[_S.FAILED.value, _S.SKIPPED.value], host__isnull=False)


def _begin_rollout(rollout: Rollout) -> None:
    """Record that a rollout has started, and wake the job."""
    _record_rollout_event(rollout, "started", rollout.actor, {"hosts": [None, rollout.total]})
    call_after_commit(jobs.enqueue_job, ROLLOUTS_JOB)


def _load_generations(driver: str, hosts: Sequence[Host]) -> dict[int, int]:
    """Return the generation of the driver's desired state on each of these hosts by id, 0 where it has none."""
    wishes = DriverWish.objects.filter(driver=driver, host__in=hosts).values_list("host_id", "generation")
    return dict.fromkeys((host.pk for host in hosts), 0) | dict(wishes)


def cancel_rollout(rollout: Rollout, caller: Caller) -> None:
    """Cancel a rollout: no further host gets the change; commands that are placed already go on to their end.

    Does nothing if the rollout is not running. Hosts that had no command yet are marked as skipped.
    """
    with conductor.writing():
        running = Rollout.objects.select_for_update().filter(pk=rollout.pk, state=_R.RUNNING).first()
        if running is not None:
            _halt_rollout(running, _R.CANCELLED, f"not begun: cancelled by {caller.name}")
            _record_rollout_event(running, "cancelled", caller.name, {"state": [_R.RUNNING.value, _R.CANCELLED.value]})
            _advance_rollout(running)


def run() -> None:
    """Run the job `rollouts`: advance rollouts until none can advance, or the job's time slice is over."""
    jobs.run_steps_outside_transaction(ROLLOUTS_JOB, advance_oldest_rollout)


def advance_oldest_rollout() -> bool:
    """Advance the oldest rollout that can advance by one step; return False if none can.

    A step records which hosts have ended, or begins the change of one more host.
    """
    return _settle_oldest_rollout() or _order_next_host()


def _settle_oldest_rollout() -> bool:
    """Record which hosts of the oldest rollout that can advance have ended, and end it if it can end; return False if
    none has changed.

    One transaction. Locks the open rollouts; those that others have locked are skipped.
    """
    with conductor.writing():
        return any(
            map(
                _advance_rollout,
                _query_open_rollouts().select_for_update(skip_locked=True),
            )
        )


def _order_next_host() -> bool:
    """Place one more order of the oldest rollout that may begin another host; return False if none may.

    The holder checks are made before the transaction that places the order. If they do not tell whether a device is
    held, or if the agent is down, the host waits, and the order is tried again after a pause: HOLDER_CHECK_ATTEMPTS or
    AGENT_ATTEMPTS times in all. If the order is refused for another reason, the host is marked as failed. A host whose
    refusal the preview has shown is marked as skipped at once. Locks the rollout.
    """
    open_rollouts = _query_open_rollouts()
    found = next((step for rollout in open_rollouts if (step := _find_next_step(rollout))), None)
    if found is None:
        return False
    answers = (
        driver_config.ask_holders_for_change(found.host, build_change(found.rollout))
        if found.host
        else safety.NO_ANSWERS
    )
    with conductor.writing():
        rollout = open_rollouts.select_for_update().filter(pk=found.rollout_id).first()
        step_row = _find_next_step(rollout) if rollout else None
        if step_row != found:
            return True  # another process was faster: look again
        try:
            with transaction.atomic():
                _order_host(step_row.rollout, step_row, answers)
        except RefusedError as refused:
            if step_row.has_foreseen_refusal:
                _end_step(step_row, _S.SKIPPED, refused.text)
            elif step_row.attempts + 1 < _count_allowed_attempts(refused):
                RolloutStep.objects.filter(pk=step_row.pk).update(
                    attempts=F("attempts") + 1, next_at=Now() + HOLDER_CHECK_PAUSE, text=refused.text[:4096]
                )
            else:
                _end_step(step_row, _S.FAILED, refused.text)
    return True


def _count_allowed_attempts(refused: RefusedError) -> int:
    """Return how often an order may be tried that ends with this refusal."""
    if isinstance(refused, command_queue.AgentDownError):
        return AGENT_ATTEMPTS
    return safety.HOLDER_CHECK_ATTEMPTS if refused.reason is RefusalReason.UNAVAILABLE else 1


def _query_open_rollouts() -> QuerySet[Rollout]:
    """Return the rollouts that have been started and have not ended, oldest first."""
    return Rollout.objects.filter(ROLLOUT_IS_OPEN).exclude(state=_R.DRAFT).order_by("id")


def _find_next_step(rollout: Rollout) -> RolloutStep | None:
    """Return the next host to which the rollout may give an order now, None if it has to wait or has none left."""
    if rollout.state != _R.RUNNING:
        return None
    step_counts = count_steps_by_state(rollout)
    if not step_counts[_S.WAITING] or step_counts[_S.ORDERED] >= rollout.max_parallel:
        return None
    if rollout.stop_on_failure and step_counts[_S.FAILED]:
        return None
    waiting = rollout.steps.filter(state=_S.WAITING).select_related("host", "rollout")
    return waiting.filter(Q(next_at=None) | Q(next_at__lte=Now())).order_by("id").first()


def delete_oldest_ended_rollout(now: datetime | None = None) -> bool:
    """Delete the oldest rollout that ended more than ROLLOUT_RETENTION ago, or the oldest draft that nobody has
    confirmed for DRAFT_RETENTION; True if there may be more. Its events stay."""
    now = now or database_clock.now()
    with conductor.writing():
        drafts = Rollout.objects.filter(state=_R.DRAFT, created_at__lt=now - DRAFT_RETENTION).order_by("id")
        if drafts.filter(pk__in=drafts.values("pk")[:1]).delete()[0]:
            conductor.record_purge("rollout", 1, DRAFT_RETENTION, verb="were created as drafts")
            return True
        old = Rollout.objects.filter(ended_at__lt=now - ROLLOUT_RETENTION).order_by("id")
        count = Rollout.objects.filter(pk__in=old.values("pk")[:1]).delete()[1].get("accelerators.Rollout", 0)
        conductor.record_purge("rollout", count, ROLLOUT_RETENTION)
        return bool(count)


def count_steps_by_state(rollout: Rollout) -> Counter[str]:
    """Count the hosts of a rollout by the state of their step."""
    return Counter(rollout.steps.values_list("state", flat=True))


def _advance_rollout(rollout: Rollout) -> bool:
    """Advance one locked rollout: record which hosts have ended, stop it after a failure, end it after its last host.

    Returns False if nothing has changed.
    """
    has_changed = _record_ended_commands(rollout)
    step_counts = count_steps_by_state(rollout)
    if rollout.state == _R.RUNNING and rollout.stop_on_failure and step_counts[_S.FAILED] and step_counts[_S.WAITING]:
        _halt_rollout(rollout, _R.STOPPED, "not begun: another host failed")
        step_counts, has_changed = count_steps_by_state(rollout), True
    if step_counts[_S.WAITING] or step_counts[_S.ORDERED] or rollout.ended_at:
        return has_changed
    if rollout.state == _R.RUNNING:
        rollout.state = _R.STOPPED.value if step_counts[_S.FAILED] and rollout.stop_on_failure else _R.DONE.value
    rollout.ended_at = rollout.updated_at = database_clock.now()
    rollout.save(update_fields=["state", "ended_at", "updated_at"])
    _record_rollout_event(
        rollout, rollout.state, rollout.actor, {word: [None, number] for word, number in sorted(step_counts.items())}
    )
    return True


def _record_ended_commands(rollout: Rollout) -> bool:
    """Mark the hosts whose commands have ended as done or failed; True if there were any."""
    # The row may be gone although the key is set: an older release deletes commands without clearing the key.
    command_deleted = Q(command__created_at__isnull=True)
    finished_steps = rollout.steps.filter(Q(command__ended_at__isnull=False) | command_deleted, state=_S.ORDERED)
    steps = list(finished_steps.select_related("command"))
    for step_row in steps:
        command = step_row.command
        succeeded = command is not None and command.state == CommandState.SUCCEEDED
        _end_step(
            step_row, _S.DONE if succeeded else _S.FAILED, command.text if command else "its command no longer exists"
        )
    return bool(steps)


def _order_host(rollout: Rollout, step_row: RolloutStep, answers: safety.HolderAnswers) -> None:
    """Place the command for one host, or mark the host as done if nothing has to be changed there.

    Raises RefusedError as `driver_config.order_driver_change` does, and NOT_FOUND if the host was deleted.
    """
    if step_row.host is None:
        raise RefusedError(RefusalReason.NOT_FOUND, f"Host {step_row.host_name} does not exist any more.")
    token = request_id.set(rollout.request_id)
    try:
        change = build_change(rollout)
        origin = ChangeOrigin(rollout.actor, rollout.reason, EventSource(rollout.source))
        command = driver_config.order_driver_change(step_row.host, change, origin, answers, step_row.generation)
    finally:
        request_id.reset(token)
    if command is None:
        unchanged_text = (
            "is not installed there" if rollout.op == RolloutOp.UNINSTALL else "is configured like this already"
        )
        _end_step(step_row, _S.DONE, f"{rollout.driver} {unchanged_text}")
    else:
        step_row.state, step_row.command = _S.ORDERED.value, command
        step_row.text, step_row.next_at = "", None  # of an attempt before
        step_row.save(update_fields=["state", "command", "text", "next_at"])


def _end_step(step_row: RolloutStep, state: RolloutStepState, text: str) -> None:
    """Store how a host's part of the rollout ended, with an event."""
    state_before, rollout = step_row.state, step_row.rollout
    step_row.state, step_row.text, step_row.ended_at = state.value, text[:4096], database_clock.now()
    step_row.save(update_fields=["state", "text", "ended_at"])
    event_details: Any = {
        "host_name": step_row.host_name,
        "subject": (rollout.uuid, str(rollout)),
        "reason": step_row.text,
    }
    changes = {"step": [state_before, step_row.state]}
    conductor.record_event(
        f"rollout.host_{state}", EventSource(rollout.source), rollout.actor, changes=changes, **event_details
    )


def _halt_rollout(rollout: Rollout, state: RolloutState, text: str) -> None:
    """Set the state of a rollout, and mark the hosts that have no order yet as skipped, with `text` as the reason."""
    rollout.state, rollout.updated_at = state.value, database_clock.now()
    rollout.save(update_fields=["state", "updated_at"])
    waiting: QuerySet[RolloutStep] = rollout.steps.filter(state=_S.WAITING)
    waiting.update(state=_S.SKIPPED.value, text=text, ended_at=rollout.updated_at)


def _check_host_count(hosts: list[Host]) -> list[Host]:
    """Return the hosts. Raises RefusedError INVALID if there are none, or more than MAX_ROLLOUT_HOSTS."""
    if not 0 < len(hosts) <= MAX_ROLLOUT_HOSTS:
        text = (
            f"More than {MAX_ROLLOUT_HOSTS} hosts are chosen: choose fewer."
            if hosts
            else "No host is chosen: none matches the selector."
        )
        raise RefusedError(RefusalReason.INVALID, text)
    return hosts


def _is_driver_running(host: Host, driver: str) -> bool:
    """Return True if the host's agent reports this driver, and not as disabled or absent."""
    entry = host.drivers.get(driver)
    return entry is not None and driver_status.driver_state_of(entry) not in driver_status.OFF_STATES


def _record_rollout_event(rollout: Rollout, verb: str, actor: str, changes: dict[str, Any]) -> None:
    """Record the event `rollout.VERB`, with the rollout's source and reason."""
    subject, source = (rollout.uuid, str(rollout)), EventSource(rollout.source)
    conductor.record_event(f"rollout.{verb}", source, actor, subject=subject, changes=changes, reason=rollout.reason)
