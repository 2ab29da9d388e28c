"""Work that takes its time, followed to its end: a bar on a terminal, lines elsewhere, all on standard error.

Called by the verbs that order something. Who breaks it off is told that it goes on, and how to look again.
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
"""Pauses between looks: short at first, for what is quick, then longer."""
PATIENCE_S = 120.0
"""So long a server that cannot be reached is asked again, while what was ordered goes on."""


@dataclass(frozen=True)
class Progress:
    """How far it is: 0 to 100, and a few words."""

    percent: float
    text: str
    ended: bool


def follow(what: str, later: str, look: Callable[[], Progress]) -> None:
    """Look until it has ended. `what` is a title, `later` how to look again.

    Raises CliError when it is broken off, or the server cannot be reached for two minutes.
    """
    told, pause, heard = "", FIRST_S, time.monotonic()
    try:
        with _bar(what) if sys.stderr.isatty() else nullcontext() as bar:
            while True:
                try:
                    now, heard = look(), time.monotonic()
                except CliError as problem:
                    if problem.exit_code != Exit.AWAY or time.monotonic() - heard > PATIENCE_S:
                        text = f"{problem.message} What was ordered goes on. Look again: {later}"
                        raise CliError(problem.exit_code, text) from None
                    now = Progress(bar.pos if bar else 0, "the server cannot be reached; trying again", False)
                if bar:
                    bar.update(int(now.percent) - bar.pos, printable(now.text))
                elif told != (told := printable(now.text)):
                    click.echo(f"{what}: {told}", err=True)
                if now.ended:
                    return
                time.sleep(pause)
                pause = min(pause * SLOWER, LAST_S)
    except KeyboardInterrupt:
        text = f"Not followed any longer; what was ordered goes on. Look again: {later}"
        raise CliError(Exit.INTERRUPTED, text) from None


def _bar(what: str) -> Any:
    return click.progressbar(
        length=100, label=what, file=sys.stderr, show_eta=False, item_show_func=lambda text: text, update_min_steps=0
    )


def until_ended(api: Api, what: str, later: str, uuids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Commands, followed until all have ended; by uuid, as they are then."""
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
