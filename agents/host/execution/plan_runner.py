"""Carry out acts on one device: get the driver's plan, run its steps, and undo them when a later one fails.

A driver only plans. Here each plan is checked (`preflight`), the value of each file before its first write is
journaled, each step is written by a writer process with a deadline, and its effect is checked.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from agents import wire
from agents.errors import AgentsError
from agents.host.execution import preflight
from agents.host.journal.command_log import CommandLog
from drivers.errors import Busy, Denied, DriverError, Failed, Gone, Timeout
from drivers.inventory import Device
from drivers.isolation.driver_main import Manifest
from drivers.isolation.threads import run_in_thread
from drivers.machine import Machine
from drivers.plan import DEVICE_SCOPE, Act, Ask, Check, Image, Lifetime, Plan, Step, Vitals, Write

log = logging.getLogger("cyborg.executor")

REPEATED_ACTS: frozenset[Act] = frozenset({"install", "uninstall", "partition"})
"""Acts that are planned and run again until the plan is empty; every other act has one round."""
MAX_ROUNDS = 4
"""Rounds of plan and steps that a repeated act gets: what one round makes (virtual functions), the next one uses."""
FIRST_POLL_S, LONGEST_POLL_S = 0.01, 0.25
"""Seconds between two checks of a step's effect: the first pause, doubled up to the second."""

ProgressReporter = Callable[[int, str], None]


class Planner(Protocol):
    """A driver in its own process: `drivers.isolation.runner.DriverProcess`.

    `plan`, `probe` and `health` raise the errors of `drivers.errors`.
    """

    @property
    def manifest(self) -> Manifest:
        """The driver's declaration about itself, such as the paths that it writes. The driver's first answer fills it
        in."""

    async def plan(self, act: Act, ask: Ask) -> Plan:
        """Return the steps that are still needed for the act; none when the device is in that state already."""

    async def probe(self) -> tuple[str, ...]:
        """Return the reasons why the driver cannot use all features of this host."""

    async def health(self, ask: Ask) -> Vitals:
        """Return the health of a device, with the readings it was derived from."""

    def release(self) -> None:
        """End the quarantine: the next call starts the process again."""


class StepWriter(Protocol):
    """A process that writes to the host for one act: `drivers.isolation.host_writer.HostWriter`."""

    @property
    def stuck(self) -> bool:
        """Whether a write hangs in the kernel, so that its process cannot be ended."""

    async def write(self, path: str, value: str, timeout_s: float) -> None:
        """Write one value into one file. Raises DriverError; Timeout when it is unknown whether the write was done."""

    async def upload(
        self, path: str, kind: str, image: Image, timeout_s: float, progress: Callable[[int], None]
    ) -> None:
        """Load an image into `path`, in the way that `kind` names; `progress` gets percent. Raises as `write`."""

    async def close(self) -> None:
        """End the process; one that hangs in the kernel is left alone."""


@dataclass(frozen=True)
class HostContext:
    """Everything of this host that acts need: drivers, file access, devices, command log and boot id.

    `machine_for(driver)` reads files and `writer_for(driver)` writes them; in both, `/state` is that driver's own
    directory.
    """

    drivers: Mapping[str, Planner]
    machine_for: Callable[[str], Machine]
    writer_for: Callable[[str], StepWriter]
    find_device: Callable[[str, str], Device | None]
    """(driver, device key) → the device as last reported, None if no such device is known."""
    command_log: CommandLog
    boot_id: str


class PlanFailedError(AgentsError):
    """An act was not completed. `outcome` and `text` go into the command's result.

    `undone`: the host is as it was before. `stuck_writer` is the writer whose write hangs in the kernel, else None.
    """

    def __init__(
        self, outcome: wire.ResultOutcome, text: str, *, undone: bool = False, stuck_writer: StepWriter | None = None
    ) -> None:
        super().__init__(text)
        self.outcome, self.text, self.undone, self.stuck_writer = outcome, text, undone, stuck_writer


class PlanRun:
    """One run of some acts on one device, one after the other; when a step fails, the steps done before are undone.

    After a time-out with unknown outcome nothing is undone. `report_progress` gets percent and a text.
    """

    def __init__(
        self,
        context: HostContext,
        driver: str,
        ask: Ask,
        report_progress: ProgressReporter,
        deadline: float = float("inf"),
    ) -> None:
        self._context, self._driver, self._ask, self._report_progress = context, driver, ask, report_progress
        self._planner = context.drivers[driver]
        self._machine, self._writer = context.machine_for(driver), context.writer_for(driver)
        self._deadline = deadline
        """The deadline on the event loop's clock: no step is begun after it."""
        self._act: Act = "install"
        self._address: str | None = None
        """The act that runs, and the PCI address of its device; None for a device that is not on PCI."""
        self._completed_steps: list[Step] = []
        self._has_begun_writing = False
        """Whether a write to the host was begun, so that the host may have been changed."""
        self.lifetime: Lifetime = "volatile"
        """How long the device keeps what the act `program` of this run has loaded."""
        self._first_values = context.command_log.get_first_values(driver, ask.key)

    async def run(self, *acts: Act) -> str:
        """Carry out the acts in order and return a sentence about the result. Raises PlanFailedError.

        May be called once only.
        """
        summaries = []
        try:
            for act in acts:
                summary = await self._run_act(act)
                detached = await self._check_detached(act)
                summaries.append(summary or detached)
        finally:
            if not self._writer.stuck:
                await self._writer.close()
        return "; ".join(filter(None, summaries)) or "nothing had to be done"

    async def _run_act(self, act: Act) -> str:
        """Plan one act and run its steps, for REPEATED_ACTS until the plan is empty. Raises PlanFailedError."""
        summaries: list[str] = []
        plan = Plan()
        try:
            for round_number in range(MAX_ROUNDS + 1):
                plan = await self._plan_round(act, plan)
                if act == "program":
                    self.lifetime = plan.lifetime
                if not plan.steps:
                    return plan.said or "; ".join(summaries)
                if round_number == MAX_ROUNDS:
                    raise Failed(f"after {MAX_ROUNDS} rounds of steps this is still to be done: {plan.steps[0].does}")
                await self._run_steps(act, plan)
                summaries.append(plan.said or ", ".join(step.does for step in plan.steps))
                if act not in REPEATED_ACTS:
                    return summaries[0]
        except Timeout as error:
            return await self._recheck_after_timeout(act, error)
        except DriverError as error:
            raise await self._undo_steps(str(error)) from None
        except sqlite3.OperationalError as error:
            raise await self._undo_steps(f"the agent cannot write to its journal ({error})") from None
        raise AssertionError("unreachable")

    async def _plan_round(self, act: Act, previous: Plan) -> Plan:
        """Return the driver's plan for the next round, without steps if the act is complete. Raises DriverError.

        `previous` is the plan of the round before, without steps in the first round. An `uninstall` is also complete if
        its device has vanished after the steps of a round, and if the driver plans the steps of that round again
        although the effects of all of them are seen: many files cannot tell whether they were written.
        """
        try:
            plan = await plan_act(self._planner, act, self._ask)
        except Gone:
            if act == "uninstall" and previous.steps:
                return Plan()
            raise
        is_repeated = act == "uninstall" and bool(previous.steps) and plan.steps == previous.steps
        effects = tuple(check for step in plan.steps for check in step.seen)
        return Plan(said=plan.said) if is_repeated and not await self._find_mismatch(effects) else plan

    async def _check_detached(self, act: Act) -> str:
        """Return what `preflight.check_detached` returns. Raises PlanFailedError if a guest still uses the function of
        a PCI handle, or if that is not known."""
        try:
            return await run_in_thread(lambda: preflight.check_detached(self._machine, act, self._ask))
        except DriverError as error:
            raise await self._undo_steps(str(error)) from None

    def _check_affected_devices(self, act: Act) -> None:
        """Raise Busy when the act affects another device with an attached handle, as the driver declares it.

        Call it when the driver has answered (`_get_scope`).
        """
        scope = self._get_scope(act)
        if scope == DEVICE_SCOPE:
            return
        this_device = (self._driver, self._ask.key)
        device = self._context.find_device(*this_device)
        attached = [one for one in self._context.command_log.list_attached_devices() if one != this_device]
        others = [(key, self._context.find_device(driver, key)) for driver, key in attached]
        preflight.check_affected_attachments(
            act, scope, device.address if device else None, [(key, one.address if one else None) for key, one in others]
        )

    def _get_scope(self, act: Act) -> str:
        """Return what the act affects, as the driver declares it in the manifest that comes with its first answer."""
        return self._planner.manifest.declares.affects.get(act, DEVICE_SCOPE)

    async def _run_steps(self, act: Act, plan: Plan) -> None:
        """Check all paths of the plan, then run its steps. Raises DriverError and sqlite3.OperationalError."""
        device = self._context.find_device(self._driver, self._ask.key)
        self._act, self._address = act, device.address if device else None
        own_addresses = await run_in_thread(lambda: preflight.find_device_addresses(self._machine, self._address))
        if device is None and act == "detach":  # a card that was pulled or has a fault: only what its handle names
            own_addresses = preflight.find_handle_addresses(self._ask)
        await run_in_thread(
            lambda: preflight.check_plan_paths(
                plan,
                self._planner.manifest.writes,
                own_addresses,
                self._machine.resolve,
                lambda write: preflight.owns_write_off_pci(self._machine, self._ask.key, write),
            )
        )
        scope = self._get_scope(act)
        if scope != DEVICE_SCOPE:
            await run_in_thread(lambda: preflight.refuse_if_guest_in_scope(self._machine, act, self._address, scope))
        for step_number, step in enumerate(plan.steps):
            self._report_progress(step_number * 100 // len(plan.steps), step.does)
            if asyncio.get_running_loop().time() > self._deadline:
                raise Failed(f"{step.does}: not started, because the time limit of the command has passed")
            await self._run_step(step, lambda part, n=step_number, step=step: self._report_progress(  # type: ignore[misc]
                (n * 100 + part) // len(plan.steps), step.does))  # fmt: skip

    async def _run_step(self, step: Step, progress: Callable[[int], None]) -> None:
        """Run one step, and wait until its effect is seen. `progress` gets percent, during a firmware upload only.

        The order is: check what the step expects, write, and poll `seen` until `timeout_s` seconds after the start of
        the write. Before this device's first write to a file of /sys, the file's value is stored in the journal; not
        for images, nor for a file that cannot be read. A write that timed out counts as done if its effect is seen.

        Raises Busy or Denied if the step may not begin, Failed if its effect is not seen in time, Gone if the command
        has no image, Timeout if the outcome of the write is unknown, any other DriverError of the checks and of the
        writer, and sqlite3.OperationalError if the journal cannot be written. Nothing is undone here; a step whose
        write was done is added to the steps that `_undo_steps` undoes, also if its effect is not seen.
        """
        await self._check_preconditions(step)
        image = self._ask.image
        if step.image and image is None:
            raise Gone(f"{step.does}: the command has no image")
        path, loop = step.write.path, asyncio.get_running_loop()
        if path.startswith("/sys/") and path not in self._first_values and not step.image:
            await self._record_first_value(step)
        deadline = loop.time() + step.timeout_s
        self._has_begun_writing = True
        try:
            if step.image and image is not None:
                await self._writer.upload(path, step.image, image, step.timeout_s, progress)
            else:
                await self._writer.write(path, step.write.value, step.timeout_s)
        except Timeout:
            if self._writer.stuck or not step.seen or await self._find_mismatch(step.seen):
                raise
        except DriverError as error:
            raise type(error)(f"{step.does}: {error}") from None
        self._completed_steps.append(step)
        pause = FIRST_POLL_S
        while mismatch := await self._find_mismatch(step.seen):
            if loop.time() >= deadline:
                raise Failed(f"{step.does}: {mismatch}")
            await asyncio.sleep(min(pause, max(deadline - loop.time(), 0)))
            pause = min(pause * 2, LONGEST_POLL_S)

    async def _check_preconditions(self, step: Step) -> None:
        """Raise Busy if a check in `step.expect` does not hold, if a device node in `step.idle` is open, if the act
        would affect another device that has an attachment by now, if the write would take something away from a guest
        or the host, or if one of these cannot be found out in time.

        Raises Denied if it is not known whether a guest uses it, and the other errors of reading the host. Timeout is
        not raised, because it would leave open whether the write was done.
        """
        try:
            if mismatch := await self._find_mismatch(step.expect):
                raise Busy(mismatch)
            for node in step.idle:
                if await run_in_thread(lambda node=node: self._machine.is_open(node)):  # type: ignore[misc]
                    raise Busy(f"{node} is open: a process uses the device")
            self._check_affected_devices(self._act)
            await self._refuse_if_user_is_harmed(step.write)
        except DriverError as error:
            kind = Busy if isinstance(error, Timeout) else type(error)
            raise kind(f"{step.does}: not started, because {error}") from None

    async def _refuse_if_user_is_harmed(self, write: Write) -> None:
        """Raise what `preflight.refuse_if_user_is_harmed` raises, for the act and the device of this run."""
        act, key, address = self._act, self._ask.key, self._address
        scope = self._get_scope(act)
        await run_in_thread(lambda: preflight.refuse_if_user_is_harmed(self._machine, act, write, key, address, scope))

    async def _find_mismatch(self, checks: tuple[Check, ...]) -> str:
        """Return the reason of the first check that does not hold, '' if all hold.

        Raises Timeout after `threads.READ_TIMEOUT_S` seconds, and the errors of reading the host.
        """
        return await run_in_thread(
            lambda: next(filter(None, (_describe_mismatch(self._machine, check) for check in checks)), "")
        )

    async def _record_first_value(self, step: Step) -> None:
        """Record in the journal what the step's file contains before this device's first write to it; ignore an
        unreadable file.

        Raises Busy if the read does not return in time: `uninstall` would not restore the file, and a write would
        probably wait for the same lock of the kernel.
        """
        path = step.write.path
        try:
            value = await run_in_thread(lambda: self._machine.read(path))
        except Timeout as error:
            raise Busy(f"{step.does}: not started, because its first value cannot be read: {error}") from None
        except DriverError as error:  # some files, such as `unbind`, cannot be read
            log.debug("the first value of %s cannot be read: %s", path, error)
            return
        self._context.command_log.store_first_value(self._driver, self._ask.key, path, value)
        self._first_values[path] = value

    async def _recheck_after_timeout(self, act: Act, error: Timeout) -> str:
        """After a time-out, find out whether the act has been completed all the same.

        Raise PlanFailedError *refused* when no write was begun. Otherwise ask the driver which steps are left, and
        return the plan's summary if none are. Raise *unknown*, and undo nothing, when steps are left, when the driver
        cannot answer, or when the write still hangs in the kernel (then the driver is not asked).
        """
        if not self._has_begun_writing:
            raise await self._undo_steps(str(error)) from None
        if self._writer.stuck:
            raise PlanFailedError(
                "unknown", f"{error}; the write hangs in the kernel, so nothing more is done", stuck_writer=self._writer
            ) from None
        try:
            plan = await plan_act(self._planner, act, self._ask)
        except DriverError as problem:
            raise PlanFailedError(
                "unknown", f"{error}; the driver cannot tell which steps are left: {problem}"
            ) from None
        if plan.steps:
            raise PlanFailedError("unknown", f"{error}; still to be done: {plan.steps[0].does}") from None
        return plan.said

    async def _undo_steps(self, reason: str) -> PlanFailedError:
        """Undo the steps that were done, the last one first. Return the PlanFailedError for the caller to raise.

        If a step cannot be undone because somebody uses what it made or may use it, or because its write hangs, the
        steps before it are not undone either: the later step rests on them. The error is *refused* when no write was
        begun, else *failed*; its text lists what was undone and what was not.
        """
        if not self._has_begun_writing:
            return PlanFailedError("refused", reason, undone=True)
        undone: list[str] = []
        not_undone: list[str] = []
        is_blocked = False
        for step in reversed(self._completed_steps):
            if is_blocked:
                not_undone.append(step.does)
                continue
            try:
                for write in step.undo:
                    await self._refuse_if_user_is_harmed(write)
                    await self._writer.write(write.path, write.value, step.timeout_s)
                (undone if step.undo else not_undone).append(step.does)
            except DriverError as error:
                not_undone.append(f"{step.does} ({error})")
                is_blocked = self._writer.stuck or isinstance(error, (Busy, Denied, Timeout))
        if undone:
            reason += f". Undone: {', '.join(undone)}"
        if not_undone:
            reason += f". Not undone: {', '.join(not_undone)}"
        return PlanFailedError(
            "failed", reason, undone=not not_undone, stuck_writer=self._writer if self._writer.stuck else None
        )


async def plan_act(planner: Planner, act: Act, ask: Ask) -> Plan:
    """Return the driver's plan. Raises the errors of `Planner.plan`.

    If the device of a PCI function that is to be detached is gone, the plan has no steps: the card was pulled or
    replaced, and whether a guest uses the function at the handle's address is asked of the kernel afterwards.
    """
    try:
        return await planner.plan(act, ask)
    except Gone:
        if preflight.is_function_detach(act, ask):
            return Plan()
        raise


def _describe_mismatch(machine: Machine, check: Check) -> str:
    """Return why the check does not hold, '' when it does; a file that is absent counts as ''."""
    try:
        actual = machine.link(check.path) if check.link else machine.read(check.path)
    except Gone:
        actual = ""
    except DriverError as error:
        return str(error)
    if actual == check.value:
        return ""
    return f"{check.path} is {actual or 'absent'!r}, wanted {check.value or 'absent'!r}"
