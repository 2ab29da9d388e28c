"""The agent's side of a driver process: start it, send it requests as JSON lines, and check its answers.

The driver is not trusted. If it raises, hangs, sends too much, sends wrong data or dies, the agent still gets an answer
in bounded time and memory: a DriverReport with the reason in `error` (promise L6), or an error of `drivers.errors`. The
other end of the pipe is `drivers.isolation.driver_main`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from drivers.base import API
from drivers.errors import KINDS, Denied, DriverError, Failed, Timeout
from drivers.inventory import DriverReport, Sample
from drivers.isolation.driver_main import CallName, DriverAnswer, Manifest
from drivers.isolation.pipe import ChildPipe, PipeError
from drivers.isolation.threads import start_in_thread, wait_for_result
from drivers.machine import Machine, OpenNodes
from drivers.plan import Act, Ask, Load, Plan, Vitals, stray

log = logging.getLogger("cyborg.driver")

FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
"""The back-off before a broken driver is started again: it doubles from the first to the longest pause."""
MAX_FAILURES, FAILURE_WINDOW_S = 5, 600.0
"""A driver that failed MAX_FAILURES times within FAILURE_WINDOW_S seconds is quarantined: only `release` ends that."""
INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "UMOCKDEV_DIR")
"""Environment variables that a driver's process inherits; none of the agent's secrets are among them.

LD_PRELOAD and UMOCKDEV_DIR allow a simulated /sys.
"""
SAMPLES_S = 2.0
"""The deadline of one round of samples, in seconds."""
SCAN_S = 10.0
"""How long the agent looks for open device nodes before a call, in seconds."""
CATCH_UP_S = 4.0
"""How long a later call waits for the answer to a round of samples that timed out, in seconds."""
RESULT_FIELDS: Mapping[str, str] = {"discover": "report", "probe": "reasons", "health": "vitals", "samples": "load"}
"""The field of DriverAnswer that holds the result of each call; the acts are answered by `plan`."""

_logged_restrictions: set[str] = set()


class DriverProcess:
    """Runs one driver in its own process.

    The process starts with the first call, keeps running between calls, and starts again after a failure.
    Calls are executed one at a time, in the order they were made; `samples` never waits for its turn. `deadline_s`
    limits one call, including the start of the process, from the moment it has its turn and the agent has looked for
    open device nodes (SCAN_S). `max_answer` is the maximum size of an answer in bytes. `state` is the driver's
    directory, to which `/state` leads. `command` replaces the process's command line in tests, and `machine` the host
    whose processes are looked at for the driver.
    """

    def __init__(
        self,
        name: str,
        node: str,
        settings: Mapping[str, object],
        *,
        state: str = "",
        deadline_s: float = 20.0,
        max_answer: int = 4 * 1024 * 1024,
        command: list[str] | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.name = name
        self.manifest = Manifest()
        self._settings = dict(settings)
        self._common_fields = {"node": node, "state": state, "settings": self._settings}
        self._machine = machine or Machine(node)
        self._deadline_s = deadline_s
        self._max_answer = max_answer
        self._command = command or [sys.executable, "-I", "-m", "drivers.isolation.driver_main", name]
        self._call_lock = asyncio.Lock()
        self._open_nodes: concurrent.futures.Future[OpenNodes] | None = None
        """The last look at the open device nodes of the host; it may hang."""
        self._pipe: ChildPipe | None = None
        self._last_call_id = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._next_start_at = 0.0
        self._failure_reason = ""
        self._failure_times: deque[float] = deque(maxlen=MAX_FAILURES)
        self._is_samples_answer_due = False
        """Whether the last request was for samples and its answer has not arrived yet."""
        self._is_release_due = False
        """Whether the next request tells the driver to forget its pauses."""
        self._unread_loads: dict[str, str] = {}
        """The last known reasons why the load of devices could not be read, by device key; new reasons are logged."""

    @property
    def pid(self) -> int | None:
        """The process id, None while no process runs."""
        return self._pipe.pid if self._pipe and not self._pipe.exited.is_set() else None

    @property
    def is_quarantined(self) -> bool:
        """Whether the process is not started again until `release`: it broke too often, or `close` was called."""
        return self._next_start_at == float("inf")

    @property
    def subsystems(self) -> tuple[str, ...]:
        """The kernel subsystems whose uevents concern the driver; empty before the first call."""
        return self.manifest.subsystems

    @property
    def watched(self) -> tuple[str, ...]:
        """The paths in the settings of files whose changes concern the driver; empty before the first call."""
        paths = (self._settings.get(key) for key in self.manifest.watched)
        return tuple(path for path in paths if isinstance(path, str) and path)

    async def discover(self) -> DriverReport:
        """Return the driver's report.

        If the driver fails in any way, the report has only `error`; no DriverError is raised.
        """
        try:
            return cast(DriverReport, (await self._call_driver("discover")).report)
        except DriverError as error:
            return DriverReport(self.name, error=str(error))

    async def probe(self) -> tuple[str, ...]:
        """Return what this host lacks for full use of the driver, including sandbox restrictions the kernel lacks.

        Raises Failed if the driver broke or is in back-off or quarantine, or the DriverError that the driver raised.
        """
        return cast("tuple[str, ...]", (await self._call_driver("probe")).reasons)

    async def health(self, ask: Ask) -> Vitals:
        """Return the health of the device `ask.key`; its load is in the samples.

        Raises Failed if the driver broke or is in back-off or quarantine, or the DriverError that the driver raised.
        """
        return cast(Vitals, (await self._call_driver("health", ask)).vitals)

    async def samples(self, asks: Sequence[Ask]) -> tuple[Sample, ...]:
        """Return the load of these devices, as far as it can be read within SAMPLES_S.

        Returns nothing while another call runs or no process runs; it never waits for its turn.
        Reasons why the load of a device cannot be read are logged when they change.

        Raises Failed if there is no answer in time or the answer is unusable. A late process is not killed, because the
        machine itself may be slow. A process that breaks is stopped and started again by the next call. Neither counts
        towards quarantine, so a driver never loses its devices because of its samples.
        """
        if self._call_lock.locked() or self.pid is None:
            return ()
        async with self._call_lock:
            try:
                async with asyncio.timeout(SAMPLES_S):
                    answer = await self._send_request("samples", SAMPLES_S, asks=asks)
            except TimeoutError:
                raise self._make_error(Failed, f"it did not return its load within {SAMPLES_S:g} s") from None
            except PipeError as error:
                await self._stop_process()
                raise self._make_error(Failed, f"it failed while its load was read: {error}") from None
        if answer.error:
            raise self._make_error(Failed, answer.error)
        load = cast(Load, answer.load)
        previous, self._unread_loads = self._unread_loads, {fault.subject: fault.reason for fault in load.unread}
        for subject, reason in self._unread_loads.items():
            if previous.get(subject) != reason:
                log.warning("driver %s: the load of device %s cannot be read: %s", self.name, subject, reason)
        return load.samples

    async def plan(self, act: Act, ask: Ask) -> Plan:
        """Return the driver's plan for `act`. Nothing on the host is changed, whatever the result.

        Raises Denied if the plan would write a path that is not in the driver's manifest, Failed if the driver broke or
        is in back-off or quarantine, or the DriverError that the driver raised.
        """
        plan = cast(Plan, (await self._call_driver(act, ask)).plan)
        if path := stray(plan, self.manifest.writes):
            raise Denied(f"{self.name}: it wants to write {path}, which is not among the paths that it declares")
        return plan

    def release(self) -> None:
        """End quarantine and back-off: the next call may start the process again at once.

        The driver itself forgets its pauses with the next call, too (`Driver.release`).
        """
        self._failure_times.clear()
        self._is_release_due = True
        self._backoff_s, self._next_start_at = FIRST_BACKOFF_S, 0.0

    async def close(self) -> None:
        """Kill the process and all processes it started; calls made after this one fail.

        It first waits for the running call and for calls that already wait. It may be called more than once.
        """
        async with self._call_lock:
            await self._stop_process()
            self._next_start_at, self._failure_reason = float("inf"), "it was stopped"

    async def _call_driver(self, call: CallName, ask: Ask | None = None) -> DriverAnswer:
        """Wait for the turn of this call, send the request and return the answer. Raises DriverError.

        During back-off or quarantine it raises Failed without starting the process. For a driver of PCI hardware, the
        agent first looks which device nodes are open. If the process breaks or does not answer in time, it is killed,
        and back-off or quarantine begins. If the caller is cancelled, the process is only killed.
        """
        async with self._call_lock:
            if time.monotonic() < self._next_start_at:
                raise self._make_error(Failed, self._failure_reason)
            fields: dict[str, object] = {"ask": ask}
            if not self.manifest.name or "pci" in self.manifest.subsystems:
                fields["open_nodes"] = await self._list_open_nodes(call)
            try:
                async with asyncio.timeout(self._deadline_s):
                    answer = await self._send_request(call, self._deadline_s, **fields)
            except (PipeError, TimeoutError) as error:
                timeout_text = f"it did not answer within {self._deadline_s:g} s and was killed"
                await self._record_failure(str(error) or timeout_text)
                raise self._make_error(Failed, self._failure_reason) from None
            except BaseException:  # cancelled: a late answer must not be taken for the answer to the next request
                await self._stop_process()
                raise
        self._backoff_s = FIRST_BACKOFF_S
        if answer.error:
            raise self._make_error(KINDS.get(answer.kind, Failed), answer.error)
        return answer

    async def _list_open_nodes(self, call: CallName) -> OpenNodes:
        """Return which device nodes are open on the host; `unseen` says why if that cannot be found out.

        It looks in a daemon thread, which may hang in the kernel. A look that still runs is waited for again, so at
        most one thread hangs. A look that takes more than SCAN_S says nothing about the devices: `discover` raises
        Failed then, so that the devices of the last report stay as they were, however long that lasts. Nothing else
        shows that a program has mapped the memory of a function, also of one that is bound to VFIO or to no driver, so
        without a look no function may be offered that was not offered before.
        """
        try:
            if self._open_nodes is None or self._open_nodes.done():
                self._open_nodes = start_in_thread(self._machine.list_open_nodes)
            return await wait_for_result(self._open_nodes, SCAN_S)
        except OSError as error:
            return OpenNodes(unseen=f"the processes of the host cannot be looked at: {error.strerror or error}")
        except Timeout:
            reason = (
                f"looking at the processes of the host takes more than {SCAN_S:g} s, so it is not known what its"
                " programs use: look for processes that hang (ps shows the state D) or have very many open files, end"
                " them, and restart the host if one hangs for ever; the agent tries again by itself"
            )
        except Failed as error:
            reason = f"the processes of the host cannot be looked at: {error}"
        if call == "discover":
            raise self._make_error(Failed, reason)
        return OpenNodes(unseen=reason)

    async def _send_request(self, call: CallName, deadline_s: float, **fields: object) -> DriverAnswer:
        """Send one request to the process, started if needed, and return its answer, which may report an error.

        There is no time limit; the caller sets one. Raises PipeError.
        """
        if self._is_samples_answer_due:
            await self._drop_late_answer()
        pipe = await self._ensure_process()
        self._last_call_id += 1
        self._is_samples_answer_due = call == "samples"  # until the answer is here
        request = {"id": self._last_call_id, "call": call, "deadline_s": deadline_s, **fields, **self._common_fields}
        if self._is_release_due:
            request["release"], self._is_release_due = True, False
        pipe.send_line(msgspec.json.encode(request))
        answer = await self._receive_answer(pipe, RESULT_FIELDS.get(call, "plan"))
        self._is_samples_answer_due = False
        return answer

    async def _drop_late_answer(self) -> None:
        """Wait for the late answer to a timed-out round of samples and drop it; if none comes, stop the process."""
        if self._pipe and self.pid is not None:
            try:
                async with asyncio.timeout(CATCH_UP_S):
                    await self._receive_answer(self._pipe, "load")
            except (TimeoutError, PipeError):
                await self._stop_process()
        self._is_samples_answer_due = False

    async def _ensure_process(self) -> ChildPipe:
        """Return the pipe to the running process, started if needed, ready for a request.

        Raises PipeError if the process cannot be started, or if a killed one has not ended.
        """
        if self._pipe and self._pipe.killed and not self._pipe.exited.is_set():
            raise PipeError("its process hangs in the kernel and cannot be killed")
        if self._pipe is None or self._pipe.exited.is_set():
            self._pipe = await self._start_process()
        self._pipe.begin_request()
        return self._pipe

    async def _start_process(self) -> ChildPipe:
        """Start the process in a session of its own, with INHERITED_VARIABLES only. Raises PipeError if that fails."""
        environment = {key: os.environ[key] for key in INHERITED_VARIABLES if key in os.environ}
        try:
            _, pipe = await asyncio.get_running_loop().subprocess_exec(
                lambda: ChildPipe(self._max_answer), *self._command, env=environment, start_new_session=True
            )
        except OSError as error:
            raise PipeError(f"it cannot be started: {error}") from None
        return pipe

    async def _receive_answer(self, pipe: ChildPipe, required_field: str) -> DriverAnswer:
        """Return the answer to the last request; it has the field `required_field` or an error.

        A manifest that arrives first is stored. Raises PipeError for an invalid answer and for an answer to another
        request.
        """
        while True:
            answer = _decode_answer(await pipe.read_line())
            if answer.ready is not None:
                self._store_manifest(pipe, answer.ready)
            elif answer.error and not answer.id:
                raise PipeError(answer.error)
            elif answer.id != self._last_call_id:
                raise PipeError(f"its answer is invalid: it is for request {answer.id}, not for {self._last_call_id}")
            elif answer.report and answer.report.driver != self.name:
                raise PipeError(f"its answer is invalid: it names the driver {answer.report.driver!r}")
            elif not answer.error and getattr(answer, required_field) is None:
                raise PipeError(f"its answer is invalid: it has neither a {required_field} nor an error")
            else:
                return answer

    def _store_manifest(self, pipe: ChildPipe, ready: Manifest) -> None:
        """Store the manifest that a process sends before its first answer.

        Raises PipeError for a second manifest (the paths that a driver may write do not change while it runs), a wrong
        name or another protocol version. Logs each missing sandbox restriction once.
        """
        if pipe.has_manifest:
            raise PipeError("its answer is invalid: it is a second manifest")
        if (ready.name, ready.api) != (self.name, API):
            raise PipeError(
                f"its manifest names the driver {ready.name!r} and version {ready.api} of the drivers' protocol, not"
                f" {self.name!r} and {API}"
            )
        pipe.has_manifest = True
        self.manifest = ready
        for reason in {*ready.unconfined} - _logged_restrictions:
            log.warning("driver %s: %s", self.name, reason)
        _logged_restrictions.update(ready.unconfined)

    async def _record_failure(self, reason: str) -> None:
        """Stop the process and set the back-off. After too many failures, quarantine the driver instead.

        The stored reason stays the same until the next start, because a changed error text would cause a new report.
        """
        last_message = self._pipe.get_last_stderr_line() if self._pipe else ""
        await self._stop_process()
        now = time.monotonic()
        self._failure_times.append(now)
        stderr_note = f" (its last message: {last_message})" if last_message else ""
        if len(self._failure_times) == MAX_FAILURES and now - self._failure_times[0] <= FAILURE_WINDOW_S:
            self._next_start_at = float("inf")
            self._failure_reason = (
                f"it failed {MAX_FAILURES} times within {FAILURE_WINDOW_S / 60:g} minutes and is not started again;"
                f" the last failure: {reason}{stderr_note}; fix the cause, then have this host rescan with {self.name},"
                " or restart the agent"
            )
            return
        self._next_start_at = now + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, MAX_BACKOFF_S)
        self._failure_reason = f"{reason}{stderr_note}; it is started again after a pause"

    async def _stop_process(self) -> None:
        """Kill the process if there is one; the pipe is kept only if the process does not end."""
        if self._pipe and await self._pipe.kill():
            self._pipe = None

    def _make_error(self, kind: type[DriverError], reason: str) -> DriverError:
        """Return, without raising it, an error whose text begins with the driver's name; at most 4096 characters."""
        return kind(f"{self.name}: {reason}"[:4096])


def _decode_answer(line: bytes) -> DriverAnswer:
    """Return the answer in one line of the process's output. Raises PipeError if it is invalid or cannot be sent on."""
    if rb"\u0000" in line:
        raise PipeError("its answer is invalid: it contains a NUL character, which cannot be stored")
    try:
        answer = msgspec.json.decode(line, type=DriverAnswer)
        msgspec.json.encode(answer)  # a lone surrogate can be decoded, but not encoded and sent on
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PipeError(f"its answer is invalid: {str(error)[:200]}") from None
    return answer
