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
from drivers.isolation.pipe import ChildPipe, PipeError
from drivers.isolation.runner import INHERITED_VARIABLES
from drivers.plan import MDEV_DEFINITIONS, Image

MAX_ANSWER_BYTES = 64 * 1024
START_S = 30.0
"""How many seconds a worker may take to start; they do not count as time of the write."""
WORKER_COMMAND = (sys.executable, "-I", "-m", "drivers.isolation.write_worker")


class HostWriter:
    """Writes below the directories in `roots` (`/sys`, `/state` → real directory), through one worker process.

    All methods raise the errors of `drivers.errors`; after Timeout the outcome of the write is unknown. Call `close`
    after the last write.
    """

    def __init__(self, roots: Mapping[str, str], command: tuple[str, ...] = WORKER_COMMAND) -> None:
        self._roots = {name: root.rstrip("/") for name, root in roots.items()}
        self._command = command
        self._pipe: ChildPipe | None = None

    @property
    def stuck(self) -> bool:
        """Whether the worker was killed but has not ended, because its write hangs in the kernel."""
        return self._pipe is not None and self._pipe.killed and not self._pipe.exited.is_set()

    async def write(self, path: str, value: str, timeout_s: float) -> None:
        """Write one value to one file. A file below /state is created if needed, and removed by an empty value; one
        below MDEV_DEFINITIONS can only be removed.

        Raises Timeout if the write takes longer than `timeout_s` seconds or the worker dies; Denied for a path outside
        `roots`; Failed if the worker cannot be started; otherwise the error that stands for the kernel's answer. While
        the worker is stuck, nothing is written, and Timeout is raised at once.
        """
        is_definition = path.startswith(f"{MDEV_DEFINITIONS}/")
        if is_definition and value:
            raise Denied(f"{path}: a definition of a mediated device can only be removed")
        order_kind = "own" if is_definition or path.startswith("/state/") else "attribute"
        await self._execute_order(
            {"do": order_kind, "path": self._resolve_path(path), "value": value}, path, timeout_s, lambda _: None
        )

    async def upload(
        self, path: str, kind: str, image: Image, timeout_s: float, progress: Callable[[int], None]
    ) -> None:
        """Write the image to `path`; `kind` is `copy` or `firmware`, as described in `drivers.plan.Step`.

        `progress` is called with the percentage during a firmware upload. Raises the same errors as `write`, and Busy
        if another firmware upload of the device runs.
        """
        order = {"do": kind, "path": self._resolve_path(path), "image": image.path}
        await self._execute_order(order, path, timeout_s, progress)

    async def close(self) -> None:
        """Kill the worker. A stuck worker is left behind; it ends by itself when its write returns in the kernel."""
        if self._pipe and await self._pipe.kill():
            self._pipe = None

    def _resolve_path(self, path: str) -> str:
        """Return the real path of a path as written on a host. Raises Denied for a path outside `roots`."""
        is_definition = path.startswith(f"{MDEV_DEFINITIONS}/")
        root_name = MDEV_DEFINITIONS if is_definition else "/" + path.split("/", 2)[1]
        if root_name not in self._roots:
            raise Denied(f"{path} is outside the directories that this agent may write")
        return self._roots[root_name] + path[len(root_name) :]

    async def _execute_order(
        self, order: dict[str, Any], path: str, timeout_s: float, progress: Callable[[int], None]
    ) -> None:
        """Send an order to the worker, started if needed, and wait at most `timeout_s` seconds for its answer.

        Raises the error in the answer, and all errors that `write` describes. `path` names the file in their texts. The
        worker is killed if it does not start, does not answer in time or answers nothing usable, and if the caller is
        cancelled.
        """
        if self.stuck:
            raise Timeout(f"{path}: an earlier write still hangs in the kernel")
        try:
            pipe = await self._ensure_worker()
            async with asyncio.timeout(timeout_s):
                answer = await _exchange_order(pipe, order, progress)
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
        if error_answer := _make_error(answer, path):
            raise error_answer

    async def _ensure_worker(self) -> ChildPipe:
        """Return a ready worker, started if needed. Raises Failed if it cannot be started; nothing is written then."""
        if self._pipe is not None and not self._pipe.exited.is_set():
            return self._pipe
        environment = {key: os.environ[key] for key in INHERITED_VARIABLES if key in os.environ}
        try:
            async with asyncio.timeout(START_S):
                _, self._pipe = await asyncio.get_running_loop().subprocess_exec(
                    lambda: ChildPipe(MAX_ANSWER_BYTES), *self._command, env=environment, start_new_session=True
                )
                await self._pipe.read_line()
        except (OSError, PipeError) as error:
            raise Failed(f"the process that writes to the host does not start: {str(error) or 'no answer'}") from None
        return self._pipe


async def _exchange_order(pipe: ChildPipe, order: dict[str, Any], progress: Callable[[int], None]) -> dict[str, Any]:
    """Send an order, pass each percentage to `progress`, and return the final answer.

    Raises PipeError if the worker ends.
    """
    pipe.begin_request()
    pipe.send_line(msgspec.json.encode(order))
    while "percent" in (answer := msgspec.json.decode(await pipe.read_line(), type=dict[str, Any])):
        progress(int(answer["percent"]))
    return answer


def _make_error(answer: Mapping[str, Any], path: str) -> DriverError | None:
    """Return the error that the worker's answer describes, or None if the write succeeded."""
    for error_class, word in ((Busy, "busy"), (Failed, "failed")):
        if word in answer:
            return error_class(str(answer[word]))
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
