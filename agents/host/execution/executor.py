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
from agents.host.discovery.driver_set import Roster
from agents.host.discovery.reporter import Reporter
from agents.host.execution import preflight, recovery
from agents.host.execution.command_semantics import (
    ACTS,
    OF_HOST,
    OPS,
    Answer,
    acts_of,
    ask_of,
    raw,
    sentence,
    settle,
    slot_of,
)
from agents.host.execution.images import Images
from agents.host.execution.placement_writer import Direct
from agents.host.execution.plan_runner import PlanFailedError, PlanRun, Site, Writer
from agents.host.journal.command_log import Applied
from agents.host.settings import EVERY
from drivers.errors import DriverError
from drivers.plan import Ask

log = logging.getLogger("cyborg.executor")

SIDE_BY_SIDE = 8
"""Largest number of devices that commands work on at the same time."""
MAX_WAITING = 1000
"""Commands are refused while more than this many wait or run."""
RETRY_S = 5.0
"""Seconds between two attempts to write to a journal whose disk is full."""
STUCK_POLL_S = 1.0
"""Seconds between two checks whether a write still hangs in the kernel."""
RECOVERY_S = 120.0
"""Seconds for restoring what a reboot removed; after that the first report is made without the rest."""
Lane = tuple[str, str]
"""(driver, device key), or (driver, op) for a command without a device: commands with the same key run in order."""


@dataclass(order=True)
class _Waiting:
    """A queued command, ordered by its number; the times are on the event loop's clock."""

    number: int
    begin_by: float = field(compare=False)
    end_by: float = field(compare=False)
    command: wire.Command = field(compare=False)


class Executor:
    """Accepts commands and runs them, the commands of one device in the order of their numbers.

    `allowed_acts` are the acts that the operator of this host allows, by driver; the entry ALL_DRIVERS holds for
    drivers without one of their own, and without either all acts are allowed. `read_log` returns the last lines of the
    agent's log.
    """

    def __init__(
        self,
        site: Site,
        reporter: Reporter,
        images: Images,
        direct: Direct | None = None,
        roster: Roster | None = None,
        *,
        rules: Mapping[str, frozenset[str]] | None = None,
        logs: Callable[[], str] = lambda: "",
        retry_s: float = RETRY_S,
    ) -> None:
        self._site, self._ledger = site, site.ledger
        self._reporter, self._images, self._direct, self._roster = reporter, images, direct, roster
        self._rules, self._logs = rules or {}, logs
        self._retry_s = retry_s
        self.progress: dict[int, wire.Progress] = {}
        """The newest progress of each command, until the session takes it out and sends it."""
        self.on_news: Callable[[], None] = lambda: None
        """Called when progress, a result or a newly accepted command is to be sent."""
        self._lanes: dict[Lane, list[_Waiting]] = {}
        self._running: set[Lane] = set()
        self._waiting: set[str] = set()
        """Ids of the commands that are queued or running."""
        self._begun: dict[tuple[str, str, str], int] = {}
        """(driver, device key, handle uuid) → the highest number of a command that was begun there."""
        self._acting: Counter[str] = Counter()
        """How many acts run, by driver. A driver is reconfigured only while this is 0, and gets no acts meanwhile."""
        self._changing: set[str] = set()
        """Drivers that are being reconfigured."""
        self._stuck: dict[Lane, Writer] = {}
        """Devices that get no acts, because a write to them hangs in the kernel."""
        self._open = asyncio.Event()
        self._free = asyncio.Semaphore(SIDE_BY_SIDE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._verdicts: list[tuple[wire.Command, Answer]] = []

    def take(self, command: wire.Command) -> None:
        """Journal a command and queue it; a command whose id is known already is not run a second time.

        If the journal cannot be written, the command is refused; nothing is raised.
        """
        try:
            if self._ledger.hear(command) in ("new", "received") and command.id not in self._waiting:
                self._enqueue(command)
        except sqlite3.OperationalError as error:
            text = f"the agent cannot write to its journal ({error})"
            self._ledger.owed[command.number] = wire.Result(command.number, "refused", text)
        self.on_news()

    async def prepare(self, limit_s: float = RECOVERY_S) -> None:
        """Find out how interrupted commands ended, and restore what a reboot removed. Must end before the first report.

        Takes at most about `timeout_s` seconds to restore; devices that are not ready by then are marked as failed. The
        results of the interrupted commands are journaled by `run`.
        """
        until = asyncio.get_running_loop().time() + limit_s
        try:
            self._ledger.forget_waiting()
        except sqlite3.OperationalError as error:
            log.error("the journal cannot be written (%s): commands are refused until it can", error)
        for command, boot in self._ledger.interrupted():
            if command.op == "configure" and self._roster:
                answer = Answer(*self._roster.verdict(command), look=command.driver)
            else:
                answer = await recovery.verdict(self._site, self._images, command, boot)
            self._verdicts.append((command, answer))
        self._images.clear()

        async def in_turn(lane: Lane) -> None:
            async with self._free:
                await self._put_back(lane)

        tasks = {lane: asyncio.ensure_future(in_turn(lane)) for lane in recovery.lost(self._site)}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=max(until - asyncio.get_running_loop().time(), 0))
        finally:
            for lane, task in tasks.items():
                if not task.done():
                    self._reporter.mark(*lane, f"it could not be restored within {limit_s:g} s after the reboot")
                    task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def run(self) -> None:
        """Run the commands accepted so far and those that come. Runs until it is cancelled.

        Call `recover_after_restart` first.
        """
        self._open.set()
        for command, answer in self._verdicts:
            self._start(self._finish(command, answer))
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _finish(self, command: wire.Command, answer: Answer) -> None:
        """Have a driver look again if `ended` names one, journal the result, and wake the session to send it.

        Retries until the journal takes the result; only a refusal is sent without being journaled.
        """
        report = await self._reporter.looked(answer.look) if answer.look else answer.report
        result = wire.Result(
            number=command.number,
            outcome=answer.outcome,
            text=sentence(answer.text),
            detail={name: value.replace("\0", "") for name, value in answer.detail.items()},
            epoch=report.epoch if report else 0,
            seq=report.seq if report else 0,
            hash=report.hash if report else "",
        )
        while True:
            try:
                self._ledger.end(command, result)
                break
            except sqlite3.OperationalError as error:
                log.error("the journal cannot store a result (%s): the result is sent once it is stored", error)
                if answer.outcome == "refused":
                    self._ledger.owed[command.number] = result  # nothing was touched, so losing it is harmless
                    break
                await asyncio.sleep(self._retry_s)
        log.info("command %d, %s %s: %s: %s", command.number, command.op, command.key, result.outcome, result.text)
        self.progress.pop(command.number, None)
        self.on_news()

    def _enqueue(self, command: wire.Command) -> None:
        """Put the command into its device's queue, with its deadlines counted from now; start the queue if needed."""
        now = asyncio.get_running_loop().time()
        lane = (command.driver, command.key or command.op)
        one = _Waiting(command.number, now + command.start_s, now + command.end_s, command)
        heapq.heappush(self._lanes.setdefault(lane, []), one)
        self._waiting.add(command.id)
        if lane not in self._running:
            self._running.add(lane)
            self._start(self._serve(lane))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, lane: Lane) -> None:
        """Run the commands of one queue until it is empty. Waits until `run` has begun."""
        await self._open.wait()
        try:
            while waiting := self._lanes.get(lane):
                async with self._free if lane[0] else nullcontext():  # a command without a driver needs no slot
                    one = heapq.heappop(waiting)
                    await self._one(one)
                    self._waiting.discard(one.command.id)
            del self._lanes[lane]
        finally:
            self._running.discard(lane)

    async def _one(self, one: _Waiting) -> None:
        """Run one command and store its result, whatever is raised."""
        command = one.command
        try:
            answer = await self._done(one)
        except DriverError as error:
            answer = Answer("refused", str(error))
        except sqlite3.OperationalError as error:
            answer = Answer("refused", f"the agent cannot write to its journal ({error})")
        except Exception as error:  # after a bug in the agent the conductor must get a result too
            log.exception("command %d (%s) failed in the agent itself", command.number, command.op)
            look = command.driver if command.driver in self._site.drivers else ""
            answer = Answer("unknown", f"the agent itself failed: {type(error).__name__}: {error}", look=look)
        await self._finish(command, answer)

    async def _done(self, one: _Waiting) -> Answer:
        """Check the command, journal that it has begun, and run it. Return how it ended.

        The caller turns DriverError and sqlite3.OperationalError into *refused*, so neither may be raised once the host
        has been touched.
        """
        command = one.command
        if problem := self._unfit(one):
            return Answer("refused", problem)
        self._ledger.begin(command, self._site.boot)
        self._tell(command, 0, "begun")
        match command.op:
            case "logs":
                answer = Answer("succeeded", "the last lines of the agent's log", {"log": self._logs()})
            case "report":
                answer = raw(self._reporter.last, command.driver)
            case "rescan":
                answer = await self._rescan(command)
            case "health":
                answer = await self._health(command)
            case "placement" if self._direct:
                answer = await self._direct.write(command, one.end_by)
            case "configure" if self._roster and command.wish:
                answer = await self._configure(command.driver, command.wish, self._roster)
            case _:
                self._acting[command.driver] += 1
                try:
                    answer = await self._act(command, one.end_by)
                finally:
                    self._acting[command.driver] -= 1
        return answer

    def _unfit(self, one: _Waiting) -> str:
        """Return the reason why the command must not be begun, '' when it may."""
        command = one.command
        late = asyncio.get_running_loop().time() > one.begin_by
        if command.op not in OPS:
            return f"this release of the agent does not support the command {command.op!r}: update the agent"
        if late or len(self._waiting) > MAX_WAITING:
            return f"the command could not be started within {command.start_s:g} s (queued: {len(self._waiting)})"
        if command.op == "placement" and self._direct is None:
            return "nothing on this host writes to Placement"
        if command.op == "configure":
            return self._unfit_change(command)
        needs_driver = command.driver or command.op not in OF_HOST
        if needs_driver and command.driver not in self._site.drivers:
            return f"the driver {command.driver!r} is not enabled on this host"
        return self._unfit_act(command) if command.op in ACTS else ""

    def _unfit_act(self, command: wire.Command) -> str:
        """Return the reason why an act must not be begun; if there is none, note its number as begun and return ''."""
        slot = (command.driver, command.key, command.uuid)
        if self._begun.get(slot, -1) > command.number:
            return f"a later command ({self._begun[slot]}) was already started here"
        if command.driver in self._changing:
            return f"the driver {command.driver} is being reconfigured: try again when that has ended"
        if command.op not in self._rules.get(command.driver, self._rules.get(EVERY, ACTS)):
            return f"the settings of {command.driver} on this host do not allow the act {command.op!r}"
        if (command.driver, command.key) in self._stuck:
            return "an earlier write to this device still hangs in the kernel"
        if self._site.device(command.driver, command.key) is None:
            return f"the driver {command.driver} finds no device {command.key} on this host"
        if len(self._begun) > MAX_WAITING:
            self._begun.clear()
        self._begun[slot] = command.number
        return ""

    def _unfit_change(self, command: wire.Command) -> str:
        """Return the reason why the driver must not be reconfigured now, '' when it may.

        A driver is not changed while one of its acts runs or hangs, or while one of its handles is attached (promise
        S3).
        """
        if self._roster is None or not command.driver or command.wish is None:
            return (
                "the command does not name a driver and its wanted state, or the drivers of this host cannot be changed"
            )
        if self._acting[command.driver] or any(driver == command.driver for driver, _ in self._stuck):
            return f"the driver {command.driver} is working on a device: try again when that has ended"
        attached = self._ledger.attached(command.driver) if command.driver in self._site.drivers else None
        if attached is None:
            return ""
        return f"the handle {attached.ask.uuid} is attached to {attached.ask.consumer}: detach it first"

    async def _configure(self, driver: str, wish: wire.Wish, roster: Roster) -> Answer:
        """Start, stop or reconfigure a driver; when it runs, restore what it had made before a reboot."""
        self._changing.add(driver)
        try:
            said = await roster.configure(driver, wish)
            if wish.runs:  # a reboot while the driver was off may have removed what it had made
                await self._reporter.looked(driver)
                for lane in filter(lambda lane: lane[0] == driver, recovery.lost(self._site)):
                    await self._put_back(lane)
            return Answer("succeeded", said, look=driver)
        finally:
            self._changing.discard(driver)

    async def _rescan(self, command: wire.Command) -> Answer:
        """End the quarantine of one driver or of all (`driver` ''), have them look, and summarise their reports."""
        running = {name: one for name, one in self._site.drivers.items() if command.driver in ("", name)}
        if not running:
            return Answer("succeeded", "no driver runs on this host")
        for one in running.values():
            one.release()
        reports = await asyncio.gather(*map(self._reporter.looked, running))
        report = max(reports, key=lambda report: report.seq)
        found = [one for one in report.drivers if one.driver in running]
        said = [one.error or f"{one.driver}: {len(one.devices)} devices, {len(one.faults)} faults" for one in found]
        lacks = {name: await self._lacks(name) for name in running}
        return Answer("succeeded", "; ".join(said), {k: text for k, text in lacks.items() if text}, report=report)

    async def _lacks(self, driver: str) -> str:
        """Return why the driver cannot use all features of this host; '' when it can, or when it no longer runs."""
        try:
            return "; ".join(await self._site.drivers[driver].probe()) if driver in self._site.drivers else ""
        except DriverError as error:
            return str(error)

    async def _health(self, command: wire.Command) -> Answer:
        vitals = await self._site.drivers[command.driver].health(ask_of(command, None, self._site))
        detail = {name: msgspec.json.encode(getattr(vitals, name)).decode() for name in ("signals", "samples")}
        detail |= {"status": vitals.status, "reason": vitals.reason}
        return Answer("succeeded", f"{vitals.status}: {vitals.reason}".removesuffix(": "), detail)

    async def _act(self, command: wire.Command, end_by: float) -> Answer:
        """Fetch the image if the command names one, and carry out the act on the device. Return how it ended."""
        try:
            async with AsyncExitStack() as stack:
                image = None
                if command.image is not None:
                    fetching = self._images.lent(
                        command.image, lambda part: self._tell(command, part, "downloading the image")
                    )
                    image = await stack.enter_async_context(fetching)
                return await self._perform(command, ask_of(command, image, self._site), end_by)
        except PlanFailedError as ended:
            if ended.hand is not None:
                self._hangs((command.driver, command.key), ended.hand, ended.text)
            return Answer(ended.outcome, ended.text, look="" if ended.outcome == "refused" else command.driver)

    async def _perform(self, command: wire.Command, ask: Ask, end_by: float) -> Answer:
        """Check the device's attachments, run the driver's plans, and note their effects in the command log.

        Retries until the command log takes the note. Raises PlanFailedError when an act fails, Busy when an attachment
        forbids it.
        """
        driver, key = command.driver, command.key
        acts = acts_of(command)
        attachments = self._ledger.attachments(driver, key)
        for act in acts:
            preflight.unattached(act, ask, attachments)
        new = "attach" in acts and ask.uuid not in attachments
        if new:  # the handle counts as attached from before the first step
            self._ledger.apply(Applied(driver, key, slot_of(command), ask, ""))
        performance = PlanRun(self._site, driver, ask, lambda *told: self._tell(command, *told), end_by)
        try:
            said = await performance.run(*acts)
        except PlanFailedError as ended:
            if new and ended.undone:
                self._gone(driver, key, slot_of(command))
            raise
        while True:
            try:
                settle(command, ask, self._ledger, self._site.boot)
                break
            except sqlite3.OperationalError as error:
                log.error("the journal cannot store what was done (%s): trying again", error)
                await asyncio.sleep(self._retry_s)
        if (driver, key) in self._reporter.marks:
            await self._put_back((driver, key))
        return Answer("succeeded", said, look=driver)

    def _gone(self, driver: str, key: str, slot: str) -> None:
        """Remove the attachment from the command log, because the act that failed was undone completely."""
        try:
            self._ledger.remove(driver, key, slot)
        except sqlite3.OperationalError as error:
            log.error(
                "the journal cannot delete %s of %s (%s): it counts as attached until it is detached", slot, key, error
            )

    def _tell(self, command: wire.Command, percent: int, text: str) -> None:
        """Replace the command's progress and wake the session, if it differs from the last one."""
        told = wire.Progress(command.number, min(max(percent, 0), 100), sentence(text)[:500])
        if self.progress.get(command.number) != told:
            self.progress[command.number] = told
            self.on_news()

    def _hangs(self, lane: Lane, hand: Writer, reason: str) -> None:
        """Mark the device as failed and refuse acts on it until the write that hangs in the kernel has ended."""

        async def wait() -> None:
            while hand.stuck:
                await asyncio.sleep(STUCK_POLL_S)
            await hand.close()
            await self._put_back(lane)  # if this hangs as well, its writer replaces this one in `_stuck_writers`
            if self._stuck.get(lane) is hand:
                del self._stuck[lane]
            self._reporter.look([lane[0]])

        self._stuck[lane] = hand
        self._reporter.mark(
            *lane, f"a write to it hangs in the kernel, and the agent does nothing to it until that ends: {reason}"
        )
        self._start(wait())

    async def _put_back(self, lane: Lane) -> None:
        """Restore on one device what a reboot removed; mark the device as failed with the reason if that fails."""
        try:
            await recovery.put_back(self._site, recovery.lost(self._site).get(lane, []))
        except PlanFailedError as ended:
            log.error("%s, %s: %s", *lane, ended.text)
            self._reporter.mark(*lane, ended.text)
            if ended.hand is not None:
                self._hangs(lane, ended.hand, ended.text)
        else:
            self._reporter.mark(*lane, "")
