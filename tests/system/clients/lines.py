"""A client in its own environment, kept running: one JSON line asks, one JSON line answers.

Starting a client costs seconds, its calls do not. `serve` is the client's side, and imports the standard library alone;
`ClientProcess` is the tests' side.
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
    """Answer until the asker hangs up. Whatever `handle` or its libraries print goes elsewhere than to the asker."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), file=answers, flush=True)


class ClientProcess:
    """The asker's end."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self, **question: Any) -> Any:
        """The answer; AssertionError with what the client printed when it ends instead."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()[-3000:]
        return json.loads(answer)


@contextmanager
def start_client(python: Path, module: str, folder: Path, **environ: str) -> Iterator[ClientProcess]:
    """Run `module`, which calls `serve`, by another environment's interpreter, in `folder`; it dies with us."""
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
