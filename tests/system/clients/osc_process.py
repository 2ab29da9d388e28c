"""Run `openstack` commands as a client process in an environment with python-openstackclient.

A question is {"words": […]}, the arguments; the answer is {"code", "out", "err"}, the exit code and the output. Each
command runs in a separate fork, because the client keeps its first login until its process ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

from drivers.isolation.process import die_with_parent
from tests.system.clients.lines import serve


def run_in_child(question: dict[str, Any]) -> Any:
    """Run one command line in a forked child and return the answer to the question."""
    ours, childs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with os.fdopen(childs, "w") as answer:
                json.dump(run_command_line(question["words"]), answer)
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(childs)
    with os.fdopen(ours) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return json.loads(said)


def run_command_line(words: list[str]) -> dict[str, Any]:
    """Run one command line in this process and return its exit code and output."""
    from openstackclient import shell

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = shell.main(words)
        except SystemExit as end:
            code = end.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def main() -> None:
    """Import the modules that every command needs, to save time in the forks; then answer questions."""
    die_with_parent(include_forks=True)
    import openstack.accelerator.v2._proxy  # noqa: F401
    import openstackclient.shell  # noqa: F401

    serve(run_in_child)


if __name__ == "__main__":
    main()
