"""A change of a driver brought to many hosts, so many at a time, stopped by the first failure if that is wanted.

Called by our own API, the console and `manage.py driver`. The hosts are frozen when it starts. The job `rollouts`
orders one host a transaction, together with the row that says so: whoever is killed, wherever, each host is ordered
once. A single host is ordered at once, and what is refused there is refused to whoever asked.
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
from accelerators.domain.errors import Reason, Refused
from accelerators.domain.states import CommandState, RolloutOp, RolloutState, Source, StepState
from accelerators.models import Host, Rollout, RolloutStep
from accelerators.models.drivers import UNDER_WAY
from accelerators.runtime import jobs
from accelerators.workflows import driver_config
from accelerators.workflows.driver_config import By, Change

JOB = "rollouts"
MOST = 10_000
"""Hosts of one rollout."""
PARALLEL, MAX_PARALLEL = 5, 100
REMEMBERED = timedelta(days=90)
_R, _S = RolloutState, StepState


@dataclass(frozen=True)
class Pace:
    """How carefully: hosts at a time, and whether a failure keeps the others from being begun."""

    max_parallel: int = PARALLEL
    stop_on_failure: bool = True


def choose(names: Sequence[str] = (), selector: Mapping[str, Any] | None = None) -> list[Host]:
    """Hosts by their names, or by a selector: `{"all": true}`, or `driver` (where it runs, or is wanted) and `name` (a
    pattern with * and ?), one or both. By name. Raises Refused INVALID.
    """
    if bool(names) == bool(selector):
        raise Refused(Reason.INVALID, "Say on which hosts: by their names (hosts), or by a selector, not both.")
    if not selector:
        found = Host.objects.filter(name__in=set(names)).order_by("name")
        if unknown := sorted(set(names) - {host.name for host in found}):
            raise Refused(Reason.INVALID, f"There is no host {', '.join(unknown)[:300]}; GET /api/hosts/ lists them.")
        return _some(list(found))
    driver, pattern, everywhere = selector.get("driver"), selector.get("name"), selector.get("all")
    texts = [value for value in (driver, pattern) if value is not None]
    usable = all(isinstance(text, str) and 0 < len(text) <= 255 and "\0" not in text for text in texts)
    if selector.keys() - {"driver", "name", "all"} or everywhere not in (None, True) or not usable:
        text = 'A selector is {"all": true}, or {"driver": "pci_driver"} and {"name": "cmp*"}, one or both.'
        raise Refused(Reason.INVALID, text)
    hosts = [host for host in Host.objects.order_by("name") if not pattern or fnmatchcase(host.name, pattern)]
    if driver:
        wished = {*Host.objects.filter(wishes__driver=driver, wishes__installed=True).values_list("pk", flat=True)}
        hosts = [host for host in hosts if host.pk in wished or _runs(host, driver)]
    return _some(hosts)


def start(
    change: Change, hosts: Sequence[Host], caller: Caller, *, pace: Pace = Pace(), reason: str = "", source: Source
) -> Rollout:
    """Begin it; a single host is ordered when this returns.

    Raises Refused INVALID, and for a single host what `wishes.order` refuses.
    """
    driver_config.check(change)
    reason = placing.check_reason(reason)
    if not 1 <= pace.max_parallel <= MAX_PARALLEL:
        raise Refused(Reason.INVALID, f"max_parallel: say how many hosts at a time, 1 to {MAX_PARALLEL}.")
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
    """No further host is begun; those that were ordered go on to their end."""
    with conductor.writing():
        running = Rollout.objects.select_for_update().filter(pk=rollout.pk, state=_R.RUNNING).first()
        if running is not None:
            _halt(running, _R.CANCELLED, f"not begun: cancelled by {caller.name}")
            _record(running, "cancelled", caller.name, {"state": [_R.RUNNING.value, _R.CANCELLED.value]})
            _advance(running)


def run() -> None:
    """The job `rollouts`."""
    jobs.run(JOB, step)


def step() -> bool:
    """One transaction's worth of the oldest rollout that can get on; False when none can."""
    with conductor.writing():
        return any(map(_advance, Rollout.objects.filter(UNDER_WAY).order_by("id").select_for_update(skip_locked=True)))


def forget(now: datetime | None = None) -> bool:
    """Delete the oldest of those that ended long ago; True when there may be more. Their events stay."""
    with conductor.writing():
        old = Rollout.objects.filter(ended_at__lt=(now or datetime.now(UTC)) - REMEMBERED).order_by("id")
        count = Rollout.objects.filter(pk__in=old.values("pk")[:1]).delete()[1].get("accelerators.Rollout", 0)
        conductor.forgot("rollout", count, REMEMBERED)
        return bool(count)


def counts(rollout: Rollout) -> Counter[str]:
    """How many hosts stand how."""
    return Counter(rollout.steps.values_list("state", flat=True))


def _advance(rollout: Rollout) -> bool:
    """What can be done now for this one, locked: hear what has ended, begin one host more, or end it."""
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
        except Refused as refused:
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
    """The hosts whose commands have ended."""
    gone = Q(command__created_at__isnull=True)  # whatever its key says: a release before this deletes none of those
    over = rollout.steps.filter(Q(command__ended_at__isnull=False) | gone, state=_S.ORDERED)
    ended = list(over.select_related("command"))
    for one in ended:
        command = one.command
        succeeded = command is not None and command.state == CommandState.SUCCEEDED
        _end(one, _S.DONE if succeeded else _S.FAILED, command.text if command else "its command is not known any more")
    return bool(ended)


def _order(rollout: Rollout, waiting: RolloutStep) -> None:
    """Begin one host. Raises Refused."""
    if waiting.host is None:
        raise Refused(Reason.UNKNOWN, f"{waiting.host_name} is not there any more.")
    token = request_id.set(rollout.request_id)
    try:
        change = Change(RolloutOp(rollout.op), rollout.driver, rollout.enabled, rollout.settings)
        by = By(rollout.actor, rollout.reason, Source(rollout.source))
        command = driver_config.order(waiting.host, change, by)
    finally:
        request_id.reset(token)
    if command is None:
        there = "is not installed there" if rollout.op == RolloutOp.UNINSTALL else "is so already"
        _end(waiting, _S.DONE, f"{rollout.driver} {there}")
    else:
        waiting.state, waiting.command = _S.ORDERED.value, command
        waiting.save(update_fields=["state", "command"])


def _end(one: RolloutStep, state: StepState, text: str) -> None:
    was, rollout = one.state, one.rollout
    one.state, one.text, one.ended_at = state.value, text[:4096], datetime.now(UTC)
    one.save(update_fields=["state", "text", "ended_at"])
    about: Any = {"host_name": one.host_name, "subject": (rollout.uuid, str(rollout)), "reason": one.text}
    changes = {"step": [was, one.state]}
    conductor.record(f"rollout.host_{state}", Source(rollout.source), rollout.actor, changes=changes, **about)


def _halt(rollout: Rollout, state: RolloutState, text: str) -> None:
    """No further host is begun."""
    rollout.state, rollout.updated_at = state.value, datetime.now(UTC)
    rollout.save(update_fields=["state", "updated_at"])
    waiting: QuerySet[RolloutStep] = rollout.steps.filter(state=_S.WAITING)
    waiting.update(state=_S.SKIPPED.value, text=text, ended_at=rollout.updated_at)


def _some(hosts: list[Host]) -> list[Host]:
    if not 0 < len(hosts) <= MOST:
        text = f"More than {MOST} hosts are chosen: choose fewer." if hosts else "No host is chosen: nothing fits."
        raise Refused(Reason.INVALID, text)
    return hosts


def _runs(host: Host, driver: str) -> bool:
    entry = host.drivers.get(driver)
    return entry is not None and driver_status.state_of(entry) not in driver_status.OFF


def _record(rollout: Rollout, verb: str, who: str, changes: dict[str, Any]) -> None:
    subject, source = (rollout.uuid, str(rollout)), Source(rollout.source)
    conductor.record(f"rollout.{verb}", source, who, subject=subject, changes=changes, reason=rollout.reason)
