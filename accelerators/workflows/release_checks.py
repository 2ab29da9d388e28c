"""Ask hosts whether released handles are unused, and give a handle free when its host has confirmed it.

The question is a `detach` command (`accelerators.requests.releases`). Its answer is stored when the command ends. The
job `releases` repeats the question with a back-off, and within a minute after a change of the host or of the device: a
new report, heartbeats again, or an operator's action. It quarantines the device of a PCI handle that waits for too
long, unless another request holds the function. Only the host's confirmation gives a handle free: neither the time
limit nor an operator's action on the device does.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import F, Q

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.devices.lifecycle import DeviceStateChange, build_lifecycle_state, store_state_changes
from accelerators.domain.device_actions import Action, state_after_action
from accelerators.domain.states import EventSource, HandleType
from accelerators.models import Command, Device, ReleasedHandle
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.requests import releases
from accelerators.runtime import database_clock, jobs
from accelerators.ui import badges

JOB = "releases"
BATCH_SIZE = 200
"""Maximum number of released handles in one step of the job."""
LONGEST_PAUSE_S, LONGEST_PAUSE_OF_OLD_S = 60.0, 3600.0
"""Maximum number of seconds between two questions about one handle: until CYBORG_DETACH_TIMEOUT_S after the release,
and later. The pauses grow with the age of the release."""
SELECT_RELEASES_HELD_ELSEWHERE = """
SELECT DISTINCT w.id FROM accelerators_releasedhandle w JOIN accelerators_acceleratorrequest r ON r.claim && w.claim
WHERE w.id = ANY(%s)
"""
"""Find the releases whose functions, or parts of them, requests hold through other handles."""


def run() -> None:
    """Run the job `releases`: ask the hosts of all released handles whose `ask_at` has passed."""
    jobs.run_steps(JOB, ask_hosts_again)


def is_repeated_question(command: Command) -> bool:
    """Return whether a failed `detach` need not be told again: it asks about a PCI handle, or this job repeats it."""
    handle = command.arguments.get("handle") or {}
    return handle.get("attach_type") == HandleType.PCI or command.actor == JOB


def store_answers(answers: Sequence[tuple[Command, str]]) -> set[int]:
    """Make the handles free whose hosts have confirmed that no guest uses them; for the others store the reason why
    they have to wait.

    `answers` has ended `detach` commands, each with '' if the host has confirmed that the handle is unused, else with
    the reason. Answers about handles that do not wait, or to questions that are older than the release, are ignored.
    Returns the ids of the commands with which this job repeated a question and got the same answer as before. Call it
    inside `conductor.writing()`, with the devices locked. The number of statements is constant.
    """
    waiting = {
        str(release.handle.uuid): release
        for release in ReleasedHandle.objects.filter(
            handle__uuid__in=[command.arguments["uuid"] for command, _ in answers if command.arguments.get("uuid")]
        ).select_related("handle__deployable__device__host")
    }
    confirmed: list[ReleasedHandle] = []
    still_waiting: list[ReleasedHandle] = []
    repetitions: set[int] = set()
    now = database_clock.now()
    for command, reason in answers:
        release = waiting.get(command.arguments.get("uuid", ""))
        if release is None or command.created_at < release.created_at:
            continue
        if not reason:
            confirmed.append(release)
        else:
            if command.actor == JOB and release.answer == reason[:1000]:
                repetitions.add(command.id)
            release.answer, release.ask_at, release.updated_at = reason[:1000], _get_next_time(release, now), now
            still_waiting.append(release)
    if still_waiting:
        ReleasedHandle.objects.bulk_update(still_waiting, ["answer", "ask_at", "updated_at"])
    if confirmed:
        ReleasedHandle.objects.filter(id__in=[release.id for release in confirmed]).delete()
        devices = [(release, release.handle.deployable.device) for release in confirmed]
        conductor.record_events(
            [
                conductor.build_event(
                    "device.handle_freed",
                    EventSource.AGENT,
                    device.host.name,
                    host=device.host,
                    subject=(device.uuid, str(device)),
                    changes={
                        f"release of handle {release.handle.attach_info}": [
                            str(release.instance) if release.instance else None,
                            None,
                        ]
                    },
                    reason="its host has confirmed that no guest uses it",
                )
                for release, device in devices
            ]
        )
        conductor.raise_provider_intents({device.host_id: device.host for _, device in devices}.values())
    return repetitions


def ask_hosts_again() -> bool:
    """Ask the hosts about one batch of due releases; return True if there may be more due releases.

    No second question is asked about a handle while a command that asks about it is open, and none while the host's
    agent is silent. The devices of handles that wait for longer than CYBORG_DETACH_TIMEOUT_S are quarantined, once for
    each release. Runs in a transaction of its own, and locks the hosts and the devices.
    """
    now = database_clock.now()
    path = "handle__deployable__device"
    is_changed = Q(updated_at__lt=F(f"{path}__host__updated_at")) | Q(updated_at__lt=F(f"{path}__updated_at"))
    is_changed &= Q(updated_at__lt=now - timedelta(seconds=LONGEST_PAUSE_S))
    due = ReleasedHandle.objects.filter(Q(ask_at__lt=now) | is_changed).order_by("ask_at")
    with conductor.writing():
        found = dict(due.values_list("id", path)[:BATCH_SIZE])
        if not found:
            return False
        devices = {one.id: one for one in conductor.lock_devices(Device.objects.filter(id__in={*found.values()}))}
        batch = list(due.filter(id__in=found).select_related("handle__deployable"))
        questions = Command.objects.filter(COMMAND_IS_OPEN, op="detach", device__in=devices)
        asked_handles = {arguments.get("uuid") for arguments in questions.values_list("arguments", flat=True)}
        overdue = [release.id for release in batch if release.ask_until and release.ask_until < now]
        held_elsewhere = _select_releases_held_elsewhere(overdue) if overdue else set()
        changes: dict[int, DeviceStateChange] = {}
        for release in batch:
            device = devices[release.handle.deployable.device_id]
            if device.host.stale_since:
                release.answer = f"the agent of {device.host.name} sends no heartbeats"
            elif not release.answer:
                release.answer = "there is no answer yet"
            if release.id in held_elsewhere:
                release.ask_until = now + timedelta(seconds=settings.KEYS.detach_timeout_s)
            elif release.ask_until and release.ask_until < now:
                release.ask_until = None
                if change := _build_quarantine(release, device):
                    changes.setdefault(device.id, change)
            release.ask_at, release.updated_at = _get_next_time(release, now), now
        ReleasedHandle.objects.bulk_update(batch, ["answer", "ask_at", "ask_until", "updated_at"])
        store_state_changes([*changes.values()], EventSource.SYSTEM)
        command_queue.place_commands(
            [
                releases.build_question(one.handle_id, one.instance, JOB)
                for one in batch
                if str(one.handle.uuid) not in asked_handles
                and not devices[one.handle.deployable.device_id].host.stale_since
            ]
        )
    return len(found) == BATCH_SIZE


def _get_next_time(release: ReleasedHandle, now: datetime) -> datetime:
    """Return when the host is asked next: after half the age of the release, but after at least FIRST_PAUSE_S and at
    most LONGEST_PAUSE_S seconds, or LONGEST_PAUSE_OF_OLD_S seconds if the release is old."""
    age_s = (now - release.created_at).total_seconds()
    is_old = age_s > settings.KEYS.detach_timeout_s
    longest_s = LONGEST_PAUSE_OF_OLD_S if is_old else LONGEST_PAUSE_S
    return now + timedelta(seconds=min(max(age_s / 2, releases.FIRST_PAUSE_S), longest_s))


def _select_releases_held_elsewhere(ids: Sequence[int]) -> set[int]:
    """Return the ids of those of these releases whose functions requests hold through other handles."""
    rows = conductor.open_cursor().execute(SELECT_RELEASES_HELD_ELSEWHERE, [list(ids)]).fetchall()
    return {id for (id,) in rows}


def _build_quarantine(release: ReleasedHandle, device: Device) -> DeviceStateChange | None:
    """Build the change of a locked device to `quarantined`; None if the device is quarantined or retired already."""
    before = build_lifecycle_state(device)
    after = state_after_action(Action.QUARANTINE, before)
    if after == before:
        return None
    name = badges.describe_handle(release.handle.attach_info)
    reason = (
        f"{name}: {release.description}. Start the host's agent if it is down; end the guest, or detach the function"
        " from it. The host is asked until it confirms that no guest uses the function; then release the device."
    )
    return DeviceStateChange(device, before, after, JOB, reason, changed_by=JOB)
