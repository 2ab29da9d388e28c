"""Driver rollouts: apply one change of a driver to many hosts, a limited number at a time.

A rollout stops at the first failure if that is wanted. Its list of hosts is fixed when it starts. The job `rollouts`
orders one host per transaction and marks the host's row in the same transaction: wherever a worker is killed, each host
is ordered once. For a single host the order is placed at once, and a refusal is raised to the caller of
`start_rollout`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import Q, QuerySet

from accelerators import conductor
from accelerators.commands import placing
from accelerators.domain import driver_status
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import CommandState, RolloutOp, RolloutState, Source, StepState
from accelerators.models import Host, Rollout, RolloutStep
from accelerators.models.drivers import UNDER_WAY
from accelerators.runtime import jobs
from accelerators.workflows import driver_config
from accelerators.workflows.driver_config import By, Change

JOB = "rollouts"
MOST = 10_000
"""Maximum number of hosts of one rollout."""
PARALLEL, MAX_PARALLEL = 5, 100
REMEMBERED = timedelta(days=90)
"""Ended rollouts are deleted after this time; their events stay."""
_R, _S = RolloutState, StepState


@dataclass(frozen=True)
class Pace:
    """How many hosts are changed at the same time, and whether a failure stops the rollout before further hosts."""

    max_parallel: int = PARALLEL
    stop_on_failure: bool = True


def choose(names: Sequence[str] = (), selector: Mapping[str, Any] | None = None) -> list[Host]:
    """Return the hosts of these names, or those that a selector matches, sorted by name.

    A selector is `{"all": true}`, or has one or both of `driver` (hosts on which this driver runs or is wanted) and
    `name` (a pattern with * and ?). Raises RefusedError INVALID for an unknown name, an invalid selector, no host, or
    more than MAX_ROLLOUT_HOSTS.
    """
    if bool(names) == bool(selector):
        raise RefusedError(Reason.INVALID, "Give either the names of the hosts (hosts) or a selector, not both.")
    if not selector:
        found = Host.objects.filter(name__in=set(names)).order_by("name")
        if unknown := sorted(set(names) - {host.name for host in found}):
            raise RefusedError(
                Reason.INVALID, f"There is no host {', '.join(unknown)[:300]}; GET /api/hosts/ lists them."
            )
        return _some(list(found))
    driver, pattern, everywhere = selector.get("driver"), selector.get("name"), selector.get("all")
    texts = [value for value in (driver, pattern) if value is not None]
    usable = all(isinstance(text, str) and 0 < len(text) <= 255 and "\0" not in text for text in texts)
    if selector.keys() - {"driver", "name", "all"} or everywhere not in (None, True) or not usable:
        text = 'A selector is {"all": true}, or {"driver": "pci_driver"} and {"name": "cmp*"}, one or both.'
        raise RefusedError(Reason.INVALID, text)
    hosts = [host for host in Host.objects.order_by("name") if not pattern or fnmatchcase(host.name, pattern)]
    if driver:
        wished = {*Host.objects.filter(wishes__driver=driver, wishes__installed=True).values_list("pk", flat=True)}
        hosts = [host for host in hosts if host.pk in wished or _runs(host, driver)]
    return _some(hosts)


def start(
    change: Change, hosts: Sequence[Host], caller: Caller, *, pace: Pace = Pace(), reason: str = "", source: Source
) -> Rollout:
    """Start a rollout of `change` on these hosts and return it; a single host is ordered when this returns.

    Raises RefusedError INVALID, and for a single host whatever `driver_config.order_driver_change` raises; then nothing
    is stored.
    """
    driver_config.check(change)
    reason = placing.check_reason(reason)
    if not 1 <= pace.max_parallel <= MAX_PARALLEL:
        raise RefusedError(Reason.INVALID, f"max_parallel, the number of hosts at a time, must be 1 to {MAX_PARALLEL}.")
    with conductor.writing():
        rollout = Rollout.objects.create(
            op=change.op,
            driver=change.driver,
            enabled=change.enabled,
            settings=change.settings,
            max_parallel=pace.max_parallel,
            stop_on_failure=pace.stop_on_failure,
            total=len(hosts),
            actor=caller.name[:255],
            reason=reason,
            request_id=request_id.get(),
            source=source,
        )
        steps = [RolloutStep(rollout=rollout, host=host, host_name=host.name) for host in hosts]
        RolloutStep.objects.bulk_create(steps, batch_size=1000)
        _record(rollout, "started", rollout.actor, {"hosts": [None, rollout.total]})
        if len(steps) == 1:
            _order(rollout, steps[0])
            _advance(rollout)
        transaction.on_commit(partial(jobs.kick, JOB), robust=True)
    return rollout


def cancel(rollout: Rollout, caller: Caller) -> None:
    """Cancel a running rollout: no further host is ordered; commands that are placed already go on to their end."""
    with conductor.writing():
        running = Rollout.objects.select_for_update().filter(pk=rollout.pk, state=_R.RUNNING).first()
        if running is not None:
            _halt(running, _R.CANCELLED, f"not begun: cancelled by {caller.name}")
            _record(running, "cancelled", caller.name, {"state": [_R.RUNNING.value, _R.CANCELLED.value]})
            _advance(running)


def run() -> None:
    """Run the job `rollouts`: advance rollouts until none can advance, or the job's time slice is over."""
    jobs.run(JOB, step)


def step() -> bool:
    """Advance the oldest rollout that can advance, in one transaction; False if none can. Skips locked rollouts."""
    with conductor.writing():
        return any(map(_advance, Rollout.objects.filter(UNDER_WAY).order_by("id").select_for_update(skip_locked=True)))


def forget(now: datetime | None = None) -> bool:
    """Delete the oldest rollout that ended more than ROLLOUT_RETENTION ago; True if there may be more. Its events
    stay."""
    with conductor.writing():
        old = Rollout.objects.filter(ended_at__lt=(now or datetime.now(UTC)) - REMEMBERED).order_by("id")
        count = Rollout.objects.filter(pk__in=old.values("pk")[:1]).delete()[1].get("accelerators.Rollout", 0)
        conductor.forgot("rollout", count, REMEMBERED)
        return bool(count)


def counts(rollout: Rollout) -> Counter[str]:
    """Count the hosts of a rollout by the state of their step."""
    return Counter(rollout.steps.values_list("state", flat=True))


def _advance(rollout: Rollout) -> bool:
    """Advance one locked rollout: record which hosts have ended, then order one more host, or end the rollout.

    A host that refuses the order is marked as failed. Returns False if nothing has changed.
    """
    got_on = _hear(rollout)
    stand = counts(rollout)
    if rollout.state == _R.RUNNING and rollout.stop_on_failure and stand[_S.FAILED] and stand[_S.WAITING]:
        _halt(rollout, _R.STOPPED, "not begun: another host failed")
        stand = counts(rollout)
    if stand[_S.WAITING] and stand[_S.ORDERED] < rollout.max_parallel:
        waiting = rollout.steps.filter(state=_S.WAITING).select_related("host").order_by("id")[0]
        try:
            with transaction.atomic():
                _order(rollout, waiting)
        except RefusedError as refused:
            _end(waiting, _S.FAILED, refused.text)
        return True
    if stand[_S.WAITING] or stand[_S.ORDERED] or rollout.ended_at:
        return got_on
    if rollout.state == _R.RUNNING:
        rollout.state = _R.STOPPED.value if stand[_S.FAILED] and rollout.stop_on_failure else _R.DONE.value
    rollout.ended_at = rollout.updated_at = datetime.now(UTC)
    rollout.save(update_fields=["state", "ended_at", "updated_at"])
    _record(rollout, rollout.state, rollout.actor, {word: [None, number] for word, number in sorted(stand.items())})
    return True


def _hear(rollout: Rollout) -> bool:
    """Mark the hosts whose commands have ended as done or failed; True if there were any."""
    # The row may be gone although the key is set: an older release deletes commands without clearing the key.
    gone = Q(command__created_at__isnull=True)
    over = rollout.steps.filter(Q(command__ended_at__isnull=False) | gone, state=_S.ORDERED)
    ended = list(over.select_related("command"))
    for one in ended:
        command = one.command
        succeeded = command is not None and command.state == CommandState.SUCCEEDED
        _end(one, _S.DONE if succeeded else _S.FAILED, command.text if command else "its command no longer exists")
    return bool(ended)


def _order(rollout: Rollout, waiting: RolloutStep) -> None:
    """Place the command for one host, or mark it as done if nothing has to be changed there. Raises RefusedError."""
    if waiting.host is None:
        raise RefusedError(Reason.UNKNOWN, f"Host {waiting.host_name} does not exist any more.")
    token = request_id.set(rollout.request_id)
    try:
        change = Change(RolloutOp(rollout.op), rollout.driver, rollout.enabled, rollout.settings)
        by = By(rollout.actor, rollout.reason, Source(rollout.source))
        command = driver_config.order(waiting.host, change, by)
    finally:
        request_id.reset(token)
    if command is None:
        there = "is not installed there" if rollout.op == RolloutOp.UNINSTALL else "is configured like this already"
        _end(waiting, _S.DONE, f"{rollout.driver} {there}")
    else:
        waiting.state, waiting.command = _S.ORDERED.value, command
        waiting.save(update_fields=["state", "command"])


def _end(one: RolloutStep, state: StepState, text: str) -> None:
    """Store how a host's part of the rollout ended, with an event."""
    was, rollout = one.state, one.rollout
    one.state, one.text, one.ended_at = state.value, text[:4096], datetime.now(UTC)
    one.save(update_fields=["state", "text", "ended_at"])
    about: Any = {"host_name": one.host_name, "subject": (rollout.uuid, str(rollout)), "reason": one.text}
    changes = {"step": [was, one.state]}
    conductor.record(f"rollout.host_{state}", Source(rollout.source), rollout.actor, changes=changes, **about)


def _halt(rollout: Rollout, state: RolloutState, text: str) -> None:
    """Set the state of a rollout and skip the hosts that are not ordered yet, with `text` as the reason."""
    rollout.state, rollout.updated_at = state.value, datetime.now(UTC)
    rollout.save(update_fields=["state", "updated_at"])
    waiting: QuerySet[RolloutStep] = rollout.steps.filter(state=_S.WAITING)
    waiting.update(state=_S.SKIPPED.value, text=text, ended_at=rollout.updated_at)


def _some(hosts: list[Host]) -> list[Host]:
    """Return the hosts. Raises RefusedError INVALID if there are none, or more than MAX_ROLLOUT_HOSTS."""
    if not 0 < len(hosts) <= MOST:
        text = (
            f"More than {MOST} hosts are chosen: choose fewer."
            if hosts
            else "No host is chosen: none matches the selector."
        )
        raise RefusedError(Reason.INVALID, text)
    return hosts


def _runs(host: Host, driver: str) -> bool:
    """Return True if the host's agent reports this driver, and not as disabled or absent."""
    entry = host.drivers.get(driver)
    return entry is not None and driver_status.state_of(entry) not in driver_status.OFF


def _record(rollout: Rollout, verb: str, who: str, changes: dict[str, Any]) -> None:
    subject, source = (rollout.uuid, str(rollout)), Source(rollout.source)
    conductor.record(f"rollout.{verb}", source, who, subject=subject, changes=changes, reason=rollout.reason)
