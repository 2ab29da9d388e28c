"""Follow long-running work until it ends: a progress bar on a terminal, else lines, all on standard error.

If the user interrupts, the work goes on at the server; the error message says so and names the command to look again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import click

from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import CliError, ExitCode, to_printable_line

FIRST_PAUSE_S, PAUSE_FACTOR, MAX_PAUSE_S = 0.1, 1.5, 2.0
"""Seconds between polls: the first pause, the factor by which each pause grows, and the longest pause."""
MAX_OUTAGE_S = 120.0
"""For how many seconds an unreachable server is polled again before `follow_until_ended` gives up. The ordered work
goes on.
"""


@dataclass(frozen=True)
class WorkProgress:
    """The progress of some work: percent (0 to 100), a short text, and whether the work has ended."""

    percent: float
    text: str
    has_ended: bool


def follow_until_ended(title: str, later_command: str, poll: Callable[[], WorkProgress]) -> None:
    """Call `poll` repeatedly and show its progress until the work has ended.

    `title` names the work; `later_command` is the command with which the user can look again, named in error messages.
    If `poll` raises CliError with AWAY, it is called again for up to `MAX_OUTAGE_S` seconds. Raises CliError when these
    have passed, for any other CliError of `poll`, and on Ctrl-C. The work goes on at the server in any case.
    """
    printed_text, pause, answered_at = "", FIRST_PAUSE_S, time.monotonic()
    try:
        with _create_progress_bar(title) if sys.stderr.isatty() else nullcontext() as bar:
            while True:
                try:
                    progress, answered_at = poll(), time.monotonic()
                except CliError as problem:
                    if problem.exit_code != ExitCode.AWAY or time.monotonic() - answered_at > MAX_OUTAGE_S:
                        text = f"{problem.message} The ordered work goes on. To look again: {later_command}"
                        raise CliError(problem.exit_code, text, problem.reason) from None
                    progress = WorkProgress(
                        bar.pos if bar else 0, "the server cannot be reached; it is tried again", False
                    )
                if bar:
                    bar.update(int(progress.percent) - bar.pos, to_printable_line(progress.text))
                elif printed_text != (printed_text := to_printable_line(progress.text)):
                    click.echo(f"{title}: {printed_text}", err=True)
                if progress.has_ended:
                    return
                time.sleep(pause)
                pause = min(pause * PAUSE_FACTOR, MAX_PAUSE_S)
    except KeyboardInterrupt:
        text = f"Following {title!r} was interrupted; the ordered work goes on. To look again: {later_command}"
        raise CliError(ExitCode.INTERRUPTED, text) from None


def _create_progress_bar(title: str) -> Any:
    """Return a progress bar on standard error from 0 to 100, which shows the text of its last update."""
    return click.progressbar(
        length=100, label=title, file=sys.stderr, show_eta=False, item_show_func=lambda text: text, update_min_steps=0
    )


def wait_for_commands(
    api: ApiClient, title: str, later_command: str, uuids: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Follow commands until all of them have ended; return the ended commands by uuid, successful or not.

    `title` and `later_command` are those of `follow_until_ended`, and CliError is raised in the same cases. A command
    that failed raises nothing. Without any uuids nothing is fetched.
    """
    command_by_uuid: dict[str, dict[str, Any]] = {uuid: {} for uuid in uuids}

    def poll() -> WorkProgress:
        """Fetch the commands that have not ended and return the progress of all."""
        for uuid, command in command_by_uuid.items():
            if not command.get("ended_at"):
                command_by_uuid[uuid] = api.get(f"commands/{uuid}/")
        ended = [command for command in command_by_uuid.values() if command["ended_at"]]
        percent = sum(100 if command["ended_at"] else command["percent"] for command in command_by_uuid.values()) / len(
            command_by_uuid
        )
        running_command = next((command for command in command_by_uuid.values() if not command["ended_at"]), None)
        state_text = f"{running_command['state']} {running_command['progress']}".strip() if running_command else "ended"
        return WorkProgress(
            percent,
            state_text if len(command_by_uuid) == 1 else f"{len(ended)} of {len(command_by_uuid)}; {state_text}",
            running_command is None,
        )

    if command_by_uuid:
        follow_until_ended(title, later_command, poll)
    return command_by_uuid
