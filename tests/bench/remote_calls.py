"""Remote calls to a child process: calls and answers are JSON lines on its standard input and output.

The parent (`tests.bench.lab`, `tests.fleet.installation`) uses `ChildProcess`; the child runs `serve_calls`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
import uvloop

from drivers.isolation.process import die_with_parent

ROOT = Path(__file__).resolve().parents[2]


class MeasurementError(RuntimeError):
    """Something that a measurement needs did not start or did not work; the text says what."""


class ChildProcess:
    """A child process that runs `module`. It ends when this process ends, and its standard error goes to `log`."""

    def __init__(self, module: str, log: IO[bytes]) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=os.environ | {"CYBORG_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"},
        )

    @property
    def pid(self) -> int:
        """Return the process id of the child."""
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Call method `do` in the child and return its answer; raise MeasurementError if this fails."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise MeasurementError(f"{self._module} ended in {do!r} with {self._process.wait(5)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise MeasurementError(f"{do}: {answer['error']}")
        return answer

    def stop(self) -> None:
        """Kill the child and wait for its end."""
        self._process.kill()
        self._process.wait()


def serve_calls(create_servant: Callable[[], object]) -> None:
    """Serve calls until standard input ends; each names an async method of the object that `create_servant` returns."""
    die_with_parent()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(create_servant))


async def _serve(create_servant: Callable[[], object]) -> None:
    servant, loop = create_servant(), asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        try:
            answer = await getattr(servant, order.pop("do"))(**order)
        except (OSError, TimeoutError, RuntimeError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(msgspec.json.encode(answer).decode(), flush=True)
