"""The agent's side of writing to the host: a `HostWriter` writes for the steps of one act at a time.

The write itself is done by a worker process (`drivers.isolation.write_worker`), which is started at the first write and
killed when a write does not return in time. If not even SIGKILL ends the worker, it hangs in the kernel and holds the
device: the HostWriter is *stuck* until the worker ends.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from drivers.errors import Busy, Denied, DriverError, Failed, Timeout, Unsupported, from_os
from drivers.isolation.pipe import Pipe, PipeError
from drivers.isolation.runner import PASSED_ON
from drivers.plan import Image

MAX_ANSWER = 64 * 1024
START_S = 30.0
"""How many seconds a worker may take to start; they do not count as time of the write."""
WORKER = (sys.executable, "-I", "-m", "drivers.isolation.write_worker")


class HostWriter:
    """Writes below the directories in `roots` (`/sys`, `/state` → real directory), through one worker process.

    All methods raise the errors of `drivers.errors`; after Timeout the outcome of the write is unknown. Call `close`
    after the last write.
    """

    def __init__(self, roots: Mapping[str, str], command: tuple[str, ...] = WORKER) -> None:
        self._roots = {name: root.rstrip("/") for name, root in roots.items()}
        self._command = command
        self._pipe: Pipe | None = None

    @property
    def stuck(self) -> bool:
        """Whether the worker was killed but has not ended, because its write hangs in the kernel."""
        return self._pipe is not None and self._pipe.killed and not self._pipe.exited.is_set()

    async def write(self, path: str, value: str, timeout_s: float) -> None:
        """Write one value to one file. A file below /state is created if needed, and removed by an empty value.

        Raises Timeout if the write takes longer than `timeout_s` or the worker dies, Denied for a path outside `roots`.
        """
        do = "own" if path.startswith("/state/") else "attribute"
        await self._ask({"do": do, "path": self._real(path), "value": value}, path, timeout_s, lambda _: None)

    async def upload(
        self, path: str, kind: str, image: Image, timeout_s: float, progress: Callable[[int], None]
    ) -> None:
        """Write the image to `path`; `kind` is `copy` or `firmware`, as described in `drivers.plan.Step`.

        `progress` is called with the percentage during a firmware upload. Raises the same errors as `write`.
        """
        order = {"do": kind, "path": self._real(path), "image": image.path}
        await self._ask(order, path, timeout_s, progress)

    async def close(self) -> None:
        """Kill the worker. A stuck worker is left behind; it ends by itself when its write returns in the kernel."""
        if self._pipe and await self._pipe.kill():
            self._pipe = None

    def _real(self, path: str) -> str:
        top = "/" + path.split("/", 2)[1]
        if top not in self._roots:
            raise Denied(f"{path} is outside the directories that this agent may write")
        return self._roots[top] + path[len(top) :]

    async def _ask(self, order: dict[str, Any], path: str, timeout_s: float, progress: Callable[[int], None]) -> None:
        if self.stuck:
            raise Timeout(f"{path}: an earlier write still hangs in the kernel")
        try:
            pipe = await self._running()
            async with asyncio.timeout(timeout_s):
                answer = await _talk(pipe, order, progress)
        except TimeoutError:
            await self.close()
            raise Timeout(f"{path}: the kernel did not answer within {timeout_s:g} s; the outcome is unknown") from None
        except PipeError as error:
            await self.close()
            raise Timeout(
                f"{path}: the process that was writing it has ended ({error}); the outcome is unknown"
            ) from None
        except BaseException:  # cancelled, or the worker did not start: nobody waits for an answer any more
            await self.close()
            raise
        if problem := _problem(answer, path):
            raise problem

    async def _running(self) -> Pipe:
        """Return a ready worker, started if needed. Raises Failed if it cannot be started; nothing is written then."""
        if self._pipe is not None and not self._pipe.exited.is_set():
            return self._pipe
        environment = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
        try:
            async with asyncio.timeout(START_S):
                _, self._pipe = await asyncio.get_running_loop().subprocess_exec(
                    lambda: Pipe(MAX_ANSWER), *self._command, env=environment, start_new_session=True
                )
                await self._pipe.line()
        except (OSError, PipeError) as error:
            raise Failed(f"the process that writes to the host does not start: {str(error) or 'no answer'}") from None
        return self._pipe


async def _talk(pipe: Pipe, order: dict[str, Any], progress: Callable[[int], None]) -> dict[str, Any]:
    pipe.begin()
    pipe.send(msgspec.json.encode(order))
    while "percent" in (answer := msgspec.json.decode(await pipe.line(), type=dict[str, Any])):
        progress(int(answer["percent"]))
    return answer


def _problem(answer: Mapping[str, Any], path: str) -> DriverError | None:
    """Return the error that the worker's answer describes, or None if the write succeeded."""
    for kind, word in ((Busy, "busy"), (Failed, "failed")):
        if word in answer:
            return kind(str(answer[word]))
    code = int(answer.get("errno", 0))
    if not code:
        return None
    if code == errno.EROFS:
        return Denied(f"{path}: it is mounted read-only for this agent (a container without write access?)")
    if code in (errno.EACCES, errno.EPERM):
        return Denied(f"{path}: {os.strerror(code)}; run the agent as root, or with CAP_DAC_OVERRIDE")
    if code == errno.ENOENT and answer["at"] == "write":  # the file exists, but its kernel driver lacks the function
        return Unsupported(f"{path}: the kernel's driver of this device cannot do that")
    return from_os(OSError(code, os.strerror(code)), path)
