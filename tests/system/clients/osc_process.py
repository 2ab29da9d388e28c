"""`openstack …` many times from one process: runs in an environment with python-openstackclient.

Asked {"words": […]}, answers {"code", "out", "err"}, as a shell would have seen them. Every command gets a fork of its
own, because the client keeps its first login for as long as its process lives.
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
    """One command line, in a child."""
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
    """One command line, here."""
    from openstackclient import shell

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = shell.main(words)
        except SystemExit as end:
            code = end.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def main() -> None:
    """Import what every command would, then serve."""
    die_with_parent(include_forks=True)
    import openstack.accelerator.v2._proxy  # noqa: F401
    import openstackclient.shell  # noqa: F401

    serve(run_in_child)


if __name__ == "__main__":
    main()
