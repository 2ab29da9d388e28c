"""One act on one device, from the driver's plan to the last step or its undoing. Used by `executor` and `recovery`.

The driver only plans; here every step is checked (`fence`), its first state journaled, done by a hand with a deadline,
looked at, and taken back when a later one fails.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from agents import wire
from agents.host.execution import preflight
from agents.host.journal.command_log import Ledger
from drivers.errors import Busy, DriverError, Failed, Gone, Timeout
from drivers.inventory import Device
from drivers.isolation.driver_main import Ready
from drivers.machine import Machine
from drivers.plan import Act, Ask, Check, Image, Plan, Step, Vitals

log = logging.getLogger("cyborg.executor")

REPEATED: frozenset[Act] = frozenset({"install", "partition"})
ROUNDS = 4
"""How often those are planned and done: what a step makes (virtual functions) is planned for in the next round."""
READ_S = 10.0
"""Seconds for a look at a few files: even reading may wait for a lock of the kernel's."""
FIRST_POLL_S, LONGEST_POLL_S = 0.01, 0.25

T = TypeVar("T")
Tell = Callable[[int, str], None]


class Planner(Protocol):
    """A driver in its own process: `drivers.isolation.runner.DriverProcess`. All raise the errors of
    `drivers.errors`."""

    @property
    def manifest(self) -> Ready:
        """What it says of itself; known once it has answered."""

    async def plan(self, act: Act, ask: Ask) -> Plan:
        """The steps that are left to do."""

    async def probe(self) -> tuple[str, ...]:
        """Why this host cannot be used to the full."""

    async def health(self, ask: Ask) -> Vitals:
        """How a device is."""

    def release(self) -> None:
        """Let it be started again after its quarantine."""


class Writer(Protocol):
    """A hand: `drivers.isolation.host_writer.Hand`."""

    @property
    def stuck(self) -> bool:
        """Whether a write hangs in the kernel and holds the device."""

    async def write(self, path: str, value: str, timeout_s: float) -> None:
        """One value into one file."""

    async def upload(
        self, path: str, kind: str, image: Image, timeout_s: float, progress: Callable[[int], None]
    ) -> None:
        """An image."""

    async def close(self) -> None:
        """The act is over."""


@dataclass(frozen=True)
class Site:
    """The host as acts need it. `machine` and `hand` are made for one driver, whose directory is their `/state`."""

    drivers: Mapping[str, Planner]
    machine: Callable[[str], Machine]
    hand: Callable[[str], Writer]
    device: Callable[[str, str], Device | None]
    """What the last look of a driver said of the device with this key."""
    ledger: Ledger
    boot: str


class Ended(Exception):
    """The act did not come to its end. `undone`: the host is as it was. `hand` is given when it is stuck."""

    def __init__(self, outcome: wire.Outcome, text: str, *, undone: bool = False, hand: Writer | None = None) -> None:
        super().__init__(text)
        self.outcome, self.text, self.undone, self.hand = outcome, text, undone, hand


class Performance:
    """Some acts on one device, one after the other; all that was done is taken back when one fails."""

    def __init__(self, site: Site, driver: str, ask: Ask, tell: Tell, until: float = float("inf")) -> None:
        self._site, self._driver, self._ask, self._tell = site, driver, ask, tell
        self._planner = site.drivers[driver]
        self._machine, self._hand = site.machine(driver), site.hand(driver)
        self._until = until
        """When nobody waits any more, on the loop's clock: no step is begun after it."""
        self._done: list[Step] = []
        self._tried = False
        self._known = site.ledger.first(driver, ask.key)

    async def run(self, *acts: Act) -> str:
        """Do them; what is so then, in words. Raises Ended."""
        said = []
        try:
            for act in acts:
                said.append(await self._act(act))
        finally:
            if not self._hand.stuck:
                await self._hand.close()
        return "; ".join(filter(None, said)) or "nothing had to be done"

    async def _act(self, act: Act) -> str:
        said: list[str] = []
        try:
            for number in range(ROUNDS + 1):
                plan = await self._planner.plan(act, self._ask)
                if not plan.steps:
                    return plan.said or "; ".join(said)
                if number == ROUNDS:
                    raise Failed(f"after {ROUNDS} rounds of steps there is still to be done: {plan.steps[0].does}")
                await self._steps(plan)
                said.append(plan.said or ", ".join(step.does for step in plan.steps))
                if act not in REPEATED:
                    return said[0]
        except Timeout as error:
            return await self._unsure(act, error)
        except DriverError as error:
            raise await self._over(str(error)) from None
        except sqlite3.OperationalError as error:
            raise await self._over(f"the agent's journal takes no write ({error})") from None
        raise AssertionError("unreachable")

    async def _steps(self, plan: Plan) -> None:
        device = self._site.device(self._driver, self._ask.key)
        own = await aside(lambda: preflight.owned(self._machine, device.address if device else None))
        await aside(lambda: preflight.check(plan, self._planner.manifest.writes, own, self._machine.resolve))
        for number, step in enumerate(plan.steps):
            self._tell(number * 100 // len(plan.steps), step.does)
            if asyncio.get_running_loop().time() > self._until:
                raise Failed(f"{step.does}: not begun, the time for all of it is over")
            await self._step(step, lambda part, n=number, step=step: self._tell(  # type: ignore[misc]
                (n * 100 + part) // len(plan.steps), step.does))  # fmt: skip

    async def _step(self, step: Step, progress: Callable[[int], None]) -> None:
        await self._ready(step)
        path, loop = step.write.path, asyncio.get_running_loop()
        if path.startswith("/sys/") and path not in self._known and not step.image:
            await self._note_first(path)
        until = loop.time() + step.timeout_s
        self._tried = True
        try:
            if step.image:
                if self._ask.image is None:
                    raise Gone(f"{step.does}: there is no image to do it with")
                await self._hand.upload(path, step.image, self._ask.image, step.timeout_s, progress)
            else:
                await self._hand.write(path, step.write.value, step.timeout_s)
        except Timeout:
            if self._hand.stuck or not step.seen or await self._missing(step.seen):
                raise
        except DriverError as error:
            raise type(error)(f"{step.does}: {error}") from None
        self._done.append(step)
        pause = FIRST_POLL_S
        while wrong := await self._missing(step.seen):
            if loop.time() >= until:
                raise Failed(f"{step.does}: {wrong}")
            await asyncio.sleep(min(pause, max(until - loop.time(), 0)))
            pause = min(pause * 2, LONGEST_POLL_S)

    async def _ready(self, step: Step) -> None:
        if wrong := await self._missing(step.expect):
            raise Busy(f"{step.does}: not begun, since {wrong}")
        for node in step.idle:
            if await aside(lambda node=node: self._machine.is_open(node)):  # type: ignore[misc]
                raise Busy(f"{step.does}: not begun, since {node} is open: somebody uses the device")

    async def _missing(self, checks: tuple[Check, ...]) -> str:
        """Why not all of them are so, '' when they are."""
        return await aside(lambda: next(filter(None, (_wrong(self._machine, check) for check in checks)), ""))

    async def _note_first(self, path: str) -> None:
        try:
            value = await aside(lambda: self._machine.read(path))
        except DriverError as error:  # files such as `unbind` are only for writing
            log.debug("%s has no first value: %s", path, error)
            return
        self._site.ledger.note_first(self._driver, self._ask.key, path, value)
        self._known[path] = value

    async def _unsure(self, act: Act, error: Timeout) -> str:
        """A write that did not return may have been done: the driver looks before anything else is."""
        if not self._tried:
            raise await self._over(str(error)) from None
        if self._hand.stuck:
            raise Ended(
                "unknown", f"{error}; it hangs in the kernel, and nothing more is done", hand=self._hand
            ) from None
        try:
            plan = await self._planner.plan(act, self._ask)
        except DriverError as problem:
            raise Ended("unknown", f"{error}; the driver cannot say what is so now: {problem}") from None
        if plan.steps:
            raise Ended("unknown", f"{error}; still to be done: {plan.steps[0].does}") from None
        return plan.said

    async def _over(self, reason: str) -> Ended:
        """Take back what was done, the last first; how it ended then."""
        if not self._tried:
            return Ended("refused", reason, undone=True)
        undone: list[str] = []
        left: list[str] = []
        for step in reversed(self._done):
            try:
                for write in step.undo:
                    await self._hand.write(write.path, write.value, step.timeout_s)
                (undone if step.undo else left).append(step.does)
            except DriverError as error:
                left.append(f"{step.does} ({error})")
                if self._hand.stuck:
                    break
        if undone:
            reason += f". Taken back: {', '.join(undone)}"
        if left:
            reason += f". Not taken back: {', '.join(left)}"
        return Ended("failed", reason, undone=not left, hand=self._hand if self._hand.stuck else None)


def _wrong(machine: Machine, check: Check) -> str:
    try:
        found = machine.link(check.path) if check.link else machine.read(check.path)
    except Gone:
        found = ""
    except DriverError as error:
        return str(error)
    if found == check.value:
        return ""
    return f"{check.path} is {found or 'absent'!r}, wanted {check.value or 'absent'!r}"


async def aside(work: Callable[[], T], timeout_s: float = READ_S) -> T:
    """A look at the host in a thread that nobody joins, for it may wait in the kernel. Raises Timeout."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not answer.done():
            if error is None:
                answer.set_result(value)  # type: ignore[arg-type]
            else:
                answer.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except Exception as problem:  # noqa: BLE001 - it is raised where the answer is awaited
            error = problem
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 forgets a cancellation that meets the answer
            return await answer
    except TimeoutError:
        raise Timeout(f"reading the host took more than {timeout_s:g} s") from None
