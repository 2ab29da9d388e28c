"""Run the conductor's commands on this host: each command at most once, in order per device, and always with a result.

`Executor.accept_command` accepts commands; the session sends their progress and the results in the command log. An act
on a device follows the driver's plan: `plan_runner` carries it out and `preflight` checks every step. `recovery` runs
before any command.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field

import msgspec

from agents import wire
from agents.host.discovery.driver_set import DriverSet
from agents.host.discovery.reporter import InventoryReporter
from agents.host.execution import preflight, recovery
from agents.host.execution.command_semantics import (
    ACTS,
    HOST_OPS,
    SUPPORTED_OPS,
    ExecutionResult,
    build_ask,
    describe_program,
    get_slot,
    is_question,
    list_acts,
    record_effects,
    render_last_report,
    sanitize_text,
)
from agents.host.execution.images import ImageCache
from agents.host.execution.placement_writer import DirectPlacementWriter
from agents.host.execution.plan_runner import HostContext, PlanFailedError, PlanRun, StepWriter
from agents.host.journal.command_log import AppliedEffect
from agents.host.settings import ALL_DRIVERS
from drivers.errors import DriverError
from drivers.plan import Ask

log = logging.getLogger("cyborg.executor")

MAX_PARALLEL_DEVICES = 8
"""Largest number of devices that commands work on at the same time."""
MAX_QUEUED_COMMANDS = 1000
"""Commands are refused while more than this many wait or run."""
JOURNAL_RETRY_S = 5.0
"""Seconds between two attempts to write to a journal whose disk is full."""
STUCK_POLL_S = 1.0
"""Seconds between two checks whether a write still hangs in the kernel."""
RECOVERY_TIMEOUT_S = 120.0
"""Seconds for restoring what a reboot removed; after that the first report is made without the rest."""
QueueKey = tuple[str, str]
"""(driver, device key), or (driver, op) for a command without a device: commands with the same key run in order."""


@dataclass(order=True)
class _QueuedCommand:
    """A queued command, ordered by its number; the times are on the event loop's clock."""

    number: int
    begin_by: float = field(compare=False)
    end_by: float = field(compare=False)
    command: wire.Command = field(compare=False)


class Executor:
    """Accepts commands and runs them, the commands of one device in the order of their numbers.

    `allowed_acts` maps a driver to the acts that this host's operator allows. The entry ALL_DRIVERS applies to each
    driver that has no entry. If both entries are missing, all acts are allowed. `read_log` returns the last lines of
    the agent's log.
    """

    def __init__(
        self,
        context: HostContext,
        reporter: InventoryReporter,
        images: ImageCache,
        placement_writer: DirectPlacementWriter | None = None,
        driver_set: DriverSet | None = None,
        *,
        allowed_acts: Mapping[str, frozenset[str]] | None = None,
        read_log: Callable[[], str],
        retry_s: float = JOURNAL_RETRY_S,
    ) -> None:
        self._context, self._command_log = context, context.command_log
        self._reporter, self._images, self._placement_writer, self._driver_set = (
            reporter,
            images,
            placement_writer,
            driver_set,
        )
        self._allowed_acts, self._read_log = allowed_acts or {}, read_log
        self._retry_s = retry_s
        self.progress: dict[int, wire.Progress] = {}
        """The newest progress of each command, until the session takes it out and sends it."""
        self.notify_sender: Callable[[], None] = lambda: None
        """Called when progress, a result or a newly accepted command is to be sent."""
        self._queues: dict[QueueKey, list[_QueuedCommand]] = {}
        self._active_queues: set[QueueKey] = set()
        self._unfinished_ids: set[str] = set()
        """Ids of the commands that are queued or running."""
        self._latest_begun: dict[tuple[str, str, str], int] = {}
        """(driver, device key, handle uuid) → the highest number of a command that was begun there."""
        self._running_acts: Counter[str] = Counter()
        """How many acts run, by driver. A driver is reconfigured only while this is 0, and gets no acts meanwhile."""
        self._reconfiguring: set[str] = set()
        """Drivers that are being reconfigured."""
        self._stuck_writers: dict[QueueKey, StepWriter] = {}
        """Devices that get no acts, because a write to them hangs in the kernel."""
        self._may_run = asyncio.Event()
        self._device_slots = asyncio.Semaphore(MAX_PARALLEL_DEVICES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._lanes_to_restore: set[QueueKey] = set()
        """Devices that could not be restored after a reboot; tried again once if they are found at another address."""
        self._recovered_results: list[tuple[wire.Command, ExecutionResult]] = []

    def accept_command(self, command: wire.Command) -> None:
        """Journal a command and queue it; a command whose id is known already is not run a second time.

        If the journal cannot be written, the command is refused; nothing is raised.
        """
        try:
            if (
                self._command_log.store_command(command) in ("new", "received")
                and command.id not in self._unfinished_ids
            ):
                self._enqueue_command(command)
        except sqlite3.OperationalError as error:
            text = f"the agent cannot write to its journal ({error})"
            self._command_log.unacknowledged[command.number] = wire.Result(command.number, "refused", text)
        self.notify_sender()

    async def recover_after_restart(self, timeout_s: float = RECOVERY_TIMEOUT_S) -> None:
        """Find out how interrupted commands ended, and restore what a reboot removed. Must end before the first report.

        Takes at most about `timeout_s` seconds to restore; devices that are not ready by then are marked as failed. The
        results of the interrupted commands are journaled by `run`.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            self._command_log.delete_unstarted()
        except sqlite3.OperationalError as error:
            log.error("the journal cannot be written (%s): commands are refused until it can", error)
        for command, boot_id in self._command_log.list_interrupted():
            if command.op == "configure" and self._driver_set:
                result = ExecutionResult(
                    *self._driver_set.determine_configure_result(command), rescan_driver=command.driver
                )
            else:
                result = await recovery.determine_interrupted_result(self._context, self._images, command, boot_id)
            self._recovered_results.append((command, result))
        self._images.delete_all()

        async def restore_with_slot(device_id: QueueKey) -> None:
            """Restore one device, while it occupies one of the MAX_PARALLEL_DEVICES places."""
            async with self._device_slots:
                await self._restore_device(device_id)

        tasks = {
            lane: asyncio.ensure_future(restore_with_slot(lane)) for lane in recovery.find_lost_effects(self._context)
        }
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=max(deadline - asyncio.get_running_loop().time(), 0))
        finally:
            for lane, task in tasks.items():
                if not task.done():
                    self._reporter.set_failure_mark(
                        *lane, f"it could not be restored within {timeout_s:g} s after the reboot"
                    )
                    task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._lanes_to_restore = {lane for lane in tasks if lane in self._reporter.failure_marks}

    async def run(self) -> None:
        """Run the commands accepted so far and those that come. Runs until it is cancelled.

        Call `recover_after_restart` first.
        """
        self._may_run.set()
        for command, result in self._recovered_results:
            self._start_task(self._record_result(command, result))
        for queue_key in self._lanes_to_restore - self._active_queues:
            self._active_queues.add(queue_key)
            self._start_task(self._run_queue(queue_key))
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _record_result(self, command: wire.Command, ended: ExecutionResult) -> None:
        """Make the driver that `ended` names (if any) discover its devices again, journal the result, and wake the
        session to send the result.

        Retries until the journal takes the result; only a refusal is sent without being journaled.
        """
        report = await self._reporter.discover_and_record(ended.rescan_driver) if ended.rescan_driver else ended.report
        result = wire.Result(
            number=command.number,
            outcome=ended.outcome,
            text=sanitize_text(ended.text),
            detail={name: value.replace("\0", "") for name, value in ended.detail.items()},
            epoch=report.epoch if report else 0,
            seq=report.seq if report else 0,
            hash=report.hash if report else "",
        )
        while True:
            try:
                self._command_log.store_result(command, result)
                break
            except sqlite3.OperationalError as error:
                log.error("the journal cannot store a result (%s): the result is sent once it is stored", error)
                if ended.outcome == "refused":
                    self._command_log.unacknowledged[command.number] = (
                        result  # nothing was touched, so losing it is harmless
                    )
                    break
                await asyncio.sleep(self._retry_s)
        log.info("command %d, %s %s: %s: %s", command.number, command.op, command.key, result.outcome, result.text)
        self.progress.pop(command.number, None)
        self.notify_sender()

    def _enqueue_command(self, command: wire.Command) -> None:
        """Put the command into its device's queue, with its deadlines counted from now; start the queue if needed."""
        now = asyncio.get_running_loop().time()
        queue_key = (command.driver, command.key or command.op)
        queued = _QueuedCommand(command.number, now + command.start_s, now + command.end_s, command)
        heapq.heappush(self._queues.setdefault(queue_key, []), queued)
        self._unfinished_ids.add(command.id)
        if queue_key not in self._active_queues:
            self._active_queues.add(queue_key)
            self._start_task(self._run_queue(queue_key))

    def _start_task(self, coroutine: Coroutine[None, None, None]) -> None:
        """Run a coroutine as a task, keep a reference to it until it is done, and let `run` cancel it at the end."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_queue(self, queue_key: QueueKey) -> None:
        """Run the commands of one queue until it is empty. Waits until `run` has begun.

        A device that could not be restored after a reboot is first looked for once more.
        """
        await self._may_run.wait()
        try:
            if queue_key in self._lanes_to_restore:
                self._lanes_to_restore.discard(queue_key)
                async with self._device_slots:
                    await self._restore_moved_device(queue_key)
            while queue := self._queues.get(queue_key):
                async with (
                    self._device_slots if queue_key[0] else nullcontext()
                ):  # a command without a driver needs no slot
                    queued = heapq.heappop(queue)
                    await self._run_command(queued)
                    self._unfinished_ids.discard(queued.command.id)
            self._queues.pop(queue_key, None)
        finally:
            self._active_queues.discard(queue_key)

    async def _run_command(self, queued: _QueuedCommand) -> None:
        """Run one command and store its result, whatever is raised.

        DriverError and sqlite3.OperationalError become *refused*; any other exception is a fault of the agent and
        becomes *unknown*.
        """
        command = queued.command
        try:
            result = await self._execute_command(queued)
        except DriverError as error:
            result = ExecutionResult("refused", str(error))
        except sqlite3.OperationalError as error:
            result = ExecutionResult("refused", f"the agent cannot write to its journal ({error})")
        except Exception as error:  # after a bug in the agent the conductor must get a result too
            log.exception("command %d (%s) failed in the agent itself", command.number, command.op)
            driver = command.driver if command.driver in self._context.drivers else ""
            result = ExecutionResult(
                "unknown", f"the agent itself failed: {type(error).__name__}: {error}", rescan_driver=driver
            )
        await self._record_result(command, result)

    async def _execute_command(self, queued: _QueuedCommand) -> ExecutionResult:
        """Check the command, journal that it has begun, and run it. Return how it ended.

        The caller turns DriverError and sqlite3.OperationalError into *refused*, so neither may be raised once the host
        has been touched.
        """
        command = queued.command
        if problem := self._find_refusal(queued):
            return ExecutionResult("refused", problem)
        self._command_log.mark_started(command, self._context.boot_id)
        self._set_progress(command, 0, "begun")
        match command.op:
            case "logs":
                result = ExecutionResult("succeeded", "the last lines of the agent's log", {"log": self._read_log()})
            case "report":
                result = render_last_report(self._reporter.last_report, command.driver)
            case "rescan":
                result = await self._rescan_drivers(command)
            case "health":
                result = await self._read_health(command)
            case "placement" if self._placement_writer:
                result = await self._placement_writer.write(command, queued.end_by)
            case "configure" if self._driver_set and command.wish:
                result = await self._configure_driver(command.driver, command.wish, self._driver_set)
            case _:
                self._running_acts[command.driver] += 1
                try:
                    result = await self._execute_act(command, queued.end_by)
                finally:
                    self._running_acts[command.driver] -= 1
        return result

    def _find_refusal(self, queued: _QueuedCommand) -> str:
        """Return the reason why the command must not be begun, '' when it may. For an act, '' also notes its number as
        begun."""
        command = queued.command
        is_late = asyncio.get_running_loop().time() > queued.begin_by
        if command.op not in SUPPORTED_OPS:
            return f"this release of the agent does not support the command {command.op!r}: update the agent"
        if is_late or len(self._unfinished_ids) > MAX_QUEUED_COMMANDS:
            return (
                f"the command could not be started within {command.start_s:g} s (queued: {len(self._unfinished_ids)})"
            )
        if command.op == "placement" and self._placement_writer is None:
            return "nothing on this host writes to Placement"
        if command.op == "configure":
            return self._find_configure_refusal(command)
        needs_driver = command.driver or command.op not in HOST_OPS
        if needs_driver and command.driver not in self._context.drivers:
            return f"the driver {command.driver!r} is not enabled on this host"
        return self._find_act_refusal(command) if command.op in ACTS else ""

    def _find_act_refusal(self, command: wire.Command) -> str:
        """Return the reason why an act must not be begun; '' if it may, and then its number is noted as begun."""
        target = (command.driver, command.key, command.uuid)
        if self._latest_begun.get(target, -1) > command.number:
            return f"a later command ({self._latest_begun[target]}) was already started here"
        if command.driver in self._reconfiguring:
            return f"the driver {command.driver} is being reconfigured: try again when that has ended"
        allowed_acts = self._allowed_acts.get(command.driver, self._allowed_acts.get(ALL_DRIVERS, ACTS))
        if command.op not in allowed_acts and not is_question(command):
            return f"the settings of {command.driver} on this host do not allow the act {command.op!r}"
        if (command.driver, command.key) in self._stuck_writers:
            return "an earlier write to this device still hangs in the kernel"
        if self._context.find_device(command.driver, command.key) is None and command.op != "detach":
            return f"the driver {command.driver} finds no device {command.key} on this host"
        if len(self._latest_begun) > MAX_QUEUED_COMMANDS:
            self._latest_begun.clear()
        self._latest_begun[target] = command.number
        return ""

    def _find_configure_refusal(self, command: wire.Command) -> str:
        """Return the reason why the driver must not be reconfigured now, '' when it may.

        A driver is not changed while one of its acts runs or hangs, or while one of its handles is attached (promise
        S3).
        """
        if self._driver_set is None or not command.driver or command.wish is None:
            return (
                "the command does not name a driver and its wanted state, or the drivers of this host cannot be changed"
            )
        if self._running_acts[command.driver] or any(driver == command.driver for driver, _ in self._stuck_writers):
            return f"the driver {command.driver} is working on a device: try again when that has ended"
        attachment = (
            self._command_log.find_attachment(command.driver) if command.driver in self._context.drivers else None
        )
        if attachment is None:
            return ""
        return f"the handle {attachment.ask.uuid} is attached to {attachment.ask.consumer}: detach it first"

    async def _configure_driver(self, driver: str, desired_state: wire.Wish, driver_set: DriverSet) -> ExecutionResult:
        """Start, stop or reconfigure a driver; when it runs, restore what it had made before a reboot.

        No act of this driver is begun meanwhile. Raises DriverError and sqlite3.OperationalError; then nothing was
        changed.
        """
        self._reconfiguring.add(driver)
        try:
            summary = await driver_set.configure_driver(driver, desired_state)
            if desired_state.should_run:  # a reboot while the driver was off may have removed what it had made
                await self._reporter.discover_and_record(driver)
                for device_id in filter(lambda lane: lane[0] == driver, recovery.find_lost_effects(self._context)):
                    await self._restore_device(device_id)
            return ExecutionResult("succeeded", summary, rescan_driver=driver)
        finally:
            self._reconfiguring.discard(driver)

    async def _rescan_drivers(self, command: wire.Command) -> ExecutionResult:
        """End the quarantine of one driver, or of all if `driver` is '', make them discover their devices again, and
        return a summary of what they reported."""
        running = {name: one for name, one in self._context.drivers.items() if command.driver in ("", name)}
        if not running:
            return ExecutionResult("succeeded", "no driver runs on this host")
        for one in running.values():
            one.release()
        reports = await asyncio.gather(*map(self._reporter.discover_and_record, running))
        report = max(reports, key=lambda report: report.seq)
        driver_reports = [one for one in report.drivers if one.driver in running]
        summaries = [
            one.error or f"{one.driver}: {len(one.devices)} devices, {len(one.faults)} faults" for one in driver_reports
        ]
        limitations = {name: await self._probe_limitations(name) for name in running}
        return ExecutionResult(
            "succeeded", "; ".join(summaries), {k: text for k, text in limitations.items() if text}, report=report
        )

    async def _probe_limitations(self, driver: str) -> str:
        """Return why the driver cannot use all features of this host; '' when it can, or when it no longer runs."""
        try:
            return "; ".join(await self._context.drivers[driver].probe()) if driver in self._context.drivers else ""
        except DriverError as error:
            return str(error)

    async def _read_health(self, command: wire.Command) -> ExecutionResult:
        """Ask the driver for the device's health. Return status and reason as text, and all readings in the details.

        `signals` and `samples` are JSON texts there. If the driver's last report has another health, the driver looks
        again, so that the conductor takes a device that has failed meanwhile out of offer. Raises DriverError.
        """
        vitals = await self._context.drivers[command.driver].health(build_ask(command, None, self._context))
        detail = {name: msgspec.json.encode(getattr(vitals, name)).decode() for name in ("signals", "samples")}
        detail |= {"status": vitals.status, "reason": vitals.reason}
        device = self._context.find_device(command.driver, command.key)
        is_news = device is not None and device.status != vitals.status
        text = f"{vitals.status}: {vitals.reason}".removesuffix(": ")
        return ExecutionResult("succeeded", text, detail, rescan_driver=command.driver if is_news else "")

    async def _execute_act(self, command: wire.Command, end_by: float) -> ExecutionResult:
        """Fetch the image if the command names one, and carry out the act on the device. Return how it ended.

        Raises DriverError when the image cannot be provided or an attachment forbids the act, and
        sqlite3.OperationalError when the journal cannot note a new attachment; then nothing was touched.
        """
        try:
            async with AsyncExitStack() as stack:
                image = None
                if command.image is not None:
                    fetching = self._images.provide_image(
                        command.image, lambda part: self._set_progress(command, part, "downloading the image"), end_by
                    )
                    image = await stack.enter_async_context(fetching)
                return await self._run_plans(command, build_ask(command, image, self._context), end_by)
        except PlanFailedError as failure:
            if failure.stuck_writer is not None:
                self._block_stuck_device((command.driver, command.key), failure.stuck_writer, failure.text)
            return ExecutionResult(
                failure.outcome, failure.text, rescan_driver="" if failure.outcome == "refused" else command.driver
            )

    async def _run_plans(self, command: wire.Command, ask: Ask, end_by: float) -> ExecutionResult:
        """Check the device's attachments, run the driver's plans, and note their effects in the command log.

        After the plans have run, it retries until the command log takes the note. If the device has a failure mark, it
        then restores what a reboot removed. Raises PlanFailedError when an act fails. Before anything is touched it may
        raise Busy, when an attachment forbids the act, or sqlite3.OperationalError, when a new attachment cannot be
        noted.
        """
        driver, key = command.driver, command.key
        acts = list_acts(command)
        attachments = self._command_log.list_attachments(driver, key)
        for act in acts:
            preflight.check_attachments(act, ask, attachments)
        is_new_attachment = "attach" in acts and ask.uuid not in attachments
        if is_new_attachment:  # the handle counts as attached from before the first step
            self._command_log.store_effect(AppliedEffect(driver, key, get_slot(command), ask, ""))
        plan_run = PlanRun(self._context, driver, ask, lambda *told: self._set_progress(command, *told), end_by)
        try:
            summary = await plan_run.run(*acts)
        except PlanFailedError as failure:
            if is_new_attachment and failure.undone:
                self._remove_attachment(driver, key, get_slot(command))
            raise
        while True:
            try:
                record_effects(command, ask, self._command_log, self._context.boot_id, plan_run.lifetime)
                break
            except sqlite3.OperationalError as error:
                log.error("the journal cannot store what was done (%s): trying again", error)
                await asyncio.sleep(self._retry_s)
        if (driver, key) in self._reporter.failure_marks:
            await self._restore_device((driver, key))
        detail = describe_program(command, self._context.boot_id, plan_run.lifetime)
        return ExecutionResult("succeeded", summary, detail, rescan_driver=driver)

    def _remove_attachment(self, driver: str, key: str, slot: str) -> None:
        """Remove the attachment from the command log, because the act that failed was undone completely."""
        try:
            self._command_log.remove_effects(driver, key, slot)
        except sqlite3.OperationalError as error:
            log.error(
                "the journal cannot delete %s of %s (%s): it counts as attached until it is detached", slot, key, error
            )

    def _set_progress(self, command: wire.Command, percent: int, text: str) -> None:
        """Replace the command's progress and wake the session, if it differs from the last one."""
        update = wire.Progress(command.number, min(max(percent, 0), 100), sanitize_text(text)[:500])
        if self.progress.get(command.number) != update:
            self.progress[command.number] = update
            self.notify_sender()

    def _block_stuck_device(self, device_id: QueueKey, writer: StepWriter, reason: str) -> None:
        """Mark the device as failed and refuse acts on it until the write that hangs in the kernel has ended."""

        async def restore_when_unstuck() -> None:
            """Wait until the write has ended; then restore the device, allow acts on it again and have its driver look
            again."""
            while writer.stuck:
                await asyncio.sleep(STUCK_POLL_S)
            await writer.close()
            await self._restore_device(
                device_id
            )  # if this hangs as well, its writer replaces this one in `_stuck_writers`
            if self._stuck_writers.get(device_id) is writer:
                del self._stuck_writers[device_id]
            self._reporter.request_discovery([device_id[0]])

        self._stuck_writers[device_id] = writer
        self._reporter.set_failure_mark(
            *device_id, f"a write to it hangs in the kernel, and the agent does nothing to it until that ends: {reason}"
        )
        self._start_task(restore_when_unstuck())

    async def _restore_moved_device(self, device_id: QueueKey) -> None:
        """Make the driver look for its devices, and restore the device if it has another address than before the
        reboot, for example because the buses were numbered anew. Otherwise the reason of the first attempt stays.

        It stays also if the agent itself fails, which is logged: the commands that wait for the device still run.
        """
        try:
            await self._reporter.discover_and_record(device_id[0])
            effects = recovery.find_lost_effects(self._context).get(device_id, [])
            is_moved = any(recovery.locate_effect(self._context, effect) != effect for effect in effects)
        except Exception:
            log.exception("%s, %s: the agent itself failed while it looked for the device again", *device_id)
            return
        if is_moved:
            await self._restore_device(device_id)

    async def _restore_device(self, device_id: QueueKey) -> None:
        """Restore on one device what a reboot removed; mark the device as failed with the reason if that fails.

        That holds also for a fault of the agent itself, because what was not restored must not be offered.
        """
        try:
            await recovery.restore_effects(self._context, recovery.find_lost_effects(self._context).get(device_id, []))
        except PlanFailedError as failure:
            log.error("%s, %s: %s", *device_id, failure.text)
            self._reporter.set_failure_mark(*device_id, failure.text)
            if failure.stuck_writer is not None:
                self._block_stuck_device(device_id, failure.stuck_writer, failure.text)
        except Exception as error:
            text = f"the agent itself failed while it restored the device: {type(error).__name__}: {error}"
            log.exception("%s, %s: %s", *device_id, text)
            self._reporter.set_failure_mark(*device_id, text)
        else:
            self._reporter.set_failure_mark(*device_id, "")
