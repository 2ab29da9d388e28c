"""Run a client in another virtual environment as a process that answers questions: one JSON line each.

The process stays, because starting a client takes seconds. `serve` is the client's side and needs only the standard
library and this repository; `ClientProcess` is the tests' side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.environment import without_settings

ROOT = Path(__file__).resolve().parents[3]


def serve(handle: Callable[[dict[str, Any]], Any]) -> None:
    """Answer each line of standard input with the result of `handle` until standard input is closed.

    Other output of `handle` and its libraries goes to standard error, so it cannot be mistaken for an answer.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), file=answers, flush=True)


class ClientProcess:
    """The tests' side of a client process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self, **question: Any) -> Any:
        """Send a question and return the answer; fail with the client's log if the client has ended."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()[-3000:]
        return json.loads(answer)


@contextmanager
def start_client(python: Path, module: str, folder: Path, **environ: str) -> Iterator[ClientProcess]:
    """Run `module`, which calls `serve`, with another environment's interpreter in `folder`; kill it at the end."""
    told = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(folder)}
    log = folder / f"{module}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env=without_settings(**told, **environ, CYBORG_PARENT=str(os.getpid())),
        )
    with process:
        try:
            yield ClientProcess(process, log)
        finally:
            process.kill()
