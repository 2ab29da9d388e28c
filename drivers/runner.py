"""A driver in its own process, seen from the agent (`agents.host.report`): asked in JSON lines, never trusted.

Whatever the driver does - raise, hang, flood, lie, die - the agent gets a DriverReport in bounded time and memory, with
the reason in `error` (promise L6). The other end of the pipe is `drivers.child`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping

import msgspec

from drivers.child import Answer, Ready
from drivers.inventory import DriverReport
from drivers.pipe import Broken, Pipe

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "UMOCKDEV_DIR")
"""The environment a driver sees: none of the agent's secrets; the last two are how a simulated /sys is put under it."""


class DriverProcess:
    """One driver. The process starts with the first call, stays between calls, and starts again after a failure.

    `deadline_s` bounds one call with its start; `max_answer` is in bytes. `command` replaces ours in tests.
    """

    def __init__(
        self,
        name: str,
        node: str,
        settings: Mapping[str, object],
        *,
        deadline_s: float = 20.0,
        max_answer: int = 4 * 1024 * 1024,
        command: list[str] | None = None,
    ) -> None:
        self.name = name
        self.subsystems: tuple[str, ...] = ()
        self.watched: tuple[str, ...] = ()
        self._settings = dict(settings)
        self._call = {"call": "discover", "node": node, "settings": self._settings}
        self._deadline_s = deadline_s
        self._max_answer = max_answer
        self._command = command or [sys.executable, "-I", "-m", "drivers.child", name]
        self._one_at_a_time = asyncio.Lock()
        self._pipe: Pipe | None = None
        self._calls = 0
        self._pause_s = FIRST_PAUSE_S
        self._not_before = 0.0
        self._broken = ""

    @property
    def pid(self) -> int | None:
        """The process, None while there is none."""
        return self._pipe.pid if self._pipe and not self._pipe.exited.is_set() else None

    async def discover(self) -> DriverReport:
        """What the driver sees now, or a report that has only `error`. Never raises for anything the driver does.

        After the first call, `subsystems` are those whose uevents concern it, `watched` the files whose changes do.
        """
        async with self._one_at_a_time:
            if time.monotonic() < self._not_before:
                return self._failed(self._broken)
            try:
                answer = await self._ask()
            except Broken as error:
                return await self._give_up(str(error))
            except BaseException:  # cancelled: the answer that may still come must not meet the next question
                await self._stop()
                raise
        self._pause_s = FIRST_PAUSE_S
        return self._failed(answer.error) if answer.report is None else answer.report

    async def close(self) -> None:
        """End the process and all it started. May be called twice."""
        async with self._one_at_a_time:
            await self._stop()

    async def _ask(self) -> Answer:
        try:
            async with asyncio.timeout(self._deadline_s):
                pipe = await self._running()
                self._calls += 1
                pipe.send(msgspec.json.encode({"id": self._calls, **self._call}))
                return await self._answer(pipe)
        except TimeoutError:
            raise Broken(f"it did not answer within {self._deadline_s:g} s and was killed") from None

    async def _running(self) -> Pipe:
        if self._pipe and self._pipe.killed and not self._pipe.exited.is_set():
            raise Broken("it is stuck in the kernel and cannot even be killed")
        if self._pipe is None or self._pipe.exited.is_set():
            self._pipe = await self._start()
        self._pipe.begin()
        return self._pipe

    async def _start(self) -> Pipe:
        environment = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
        try:
            _, pipe = await asyncio.get_running_loop().subprocess_exec(
                lambda: Pipe(self._max_answer), *self._command, env=environment, start_new_session=True
            )
        except OSError as error:
            raise Broken(f"it cannot be started: {error}") from None
        return pipe

    async def _answer(self, pipe: Pipe) -> Answer:
        while True:
            answer = _decoded(await pipe.line())
            if answer.ready is not None:
                self._learn(answer.ready)
            elif answer.error and not answer.id:
                raise Broken(answer.error)
            elif answer.id != self._calls:
                raise Broken(f"it answered rubbish: to question {answer.id} in place of {self._calls}")
            elif answer.report and answer.report.driver != self.name:
                raise Broken(f"it answered rubbish: in the name of {answer.report.driver!r}")
            elif answer.report is None and not answer.error:
                raise Broken("it answered rubbish: neither a report nor an error")
            else:
                return answer

    def _learn(self, ready: Ready) -> None:
        self.subsystems = ready.subsystems
        paths = [self._settings.get(key) for key in ready.watched]
        self.watched = tuple(path for path in paths if isinstance(path, str) and path)

    async def _give_up(self, reason: str) -> DriverReport:
        """Kill what is left and start again later. The words stay the same all that time: each change is a report."""
        tail = self._pipe.complaint() if self._pipe else ""
        await self._stop()
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        said = f" (it said: {tail})" if tail else ""
        self._broken = f"{reason}{said}; it is started again after a pause"
        return self._failed(self._broken)

    async def _stop(self) -> None:
        if self._pipe and await self._pipe.kill():
            self._pipe = None

    def _failed(self, reason: str) -> DriverReport:
        return DriverReport(self.name, error=f"{self.name}: {reason}"[:4096])


def _decoded(line: bytes) -> Answer:
    if rb"\u0000" in line:
        raise Broken("it answered rubbish: text with NUL characters, which no database takes")
    try:
        answer = msgspec.json.decode(line, type=Answer)
        msgspec.json.encode(answer)  # half a surrogate pair may be read, but not be sent on
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Broken(f"it answered rubbish: {str(error)[:200]}") from None
    return answer
