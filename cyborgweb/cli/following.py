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

from cyborgweb.cli.connection import Api
from cyborgweb.cli.problems import CliError, Exit, printable

FIRST_S, SLOWER, LAST_S = 0.1, 1.5, 2.0
"""Seconds between polls: the first pause, the factor by which each pause grows, and the longest pause."""
PATIENCE_S = 120.0
"""For how many seconds an unreachable server is polled again before `follow` gives up. The ordered work goes on."""


@dataclass(frozen=True)
class Progress:
    """The progress of some work: percent (0 to 100), a short text, and whether the work has ended."""

    percent: float
    text: str
    ended: bool


def follow(what: str, later: str, look: Callable[[], Progress]) -> None:
    """Call `look` repeatedly and show its progress until the work has ended.

    `what` is the title; `later` is the command with which the user can look again, named in error messages. Raises
    CliError on Ctrl-C, on any error of `look`, and when the server could not be reached for `PATIENCE_S`.
    """
    told, pause, heard = "", FIRST_S, time.monotonic()
    try:
        with _bar(what) if sys.stderr.isatty() else nullcontext() as bar:
            while True:
                try:
                    now, heard = look(), time.monotonic()
                except CliError as problem:
                    if problem.exit_code != Exit.AWAY or time.monotonic() - heard > PATIENCE_S:
                        text = f"{problem.message} The ordered work goes on. To look again: {later}"
                        raise CliError(problem.exit_code, text) from None
                    now = Progress(bar.pos if bar else 0, "the server cannot be reached; it is tried again", False)
                if bar:
                    bar.update(int(now.percent) - bar.pos, printable(now.text))
                elif told != (told := printable(now.text)):
                    click.echo(f"{what}: {told}", err=True)
                if now.ended:
                    return
                time.sleep(pause)
                pause = min(pause * SLOWER, LAST_S)
    except KeyboardInterrupt:
        text = f"The command stopped following; the ordered work goes on. To look again: {later}"
        raise CliError(Exit.INTERRUPTED, text) from None


def _bar(what: str) -> Any:
    return click.progressbar(
        length=100, label=what, file=sys.stderr, show_eta=False, item_show_func=lambda text: text, update_min_steps=0
    )


def until_ended(api: Api, what: str, later: str, uuids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Follow commands until all of them have ended; return the ended commands by uuid. Raises CliError as `follow`."""
    seen: dict[str, dict[str, Any]] = {uuid: {} for uuid in uuids}

    def look() -> Progress:
        for uuid, command in seen.items():
            if not command.get("ended_at"):
                seen[uuid] = api.get(f"commands/{uuid}/")
        ended = [command for command in seen.values() if command["ended_at"]]
        percent = sum(100 if command["ended_at"] else command["percent"] for command in seen.values()) / len(seen)
        busy = next((command for command in seen.values() if not command["ended_at"]), None)
        said = f"{busy['state']} {busy['progress']}".strip() if busy else "ended"
        return Progress(percent, said if len(seen) == 1 else f"{len(ended)} of {len(seen)}; {said}", busy is None)

    if seen:
        follow(what, later, look)
    return seen
