"""Wait for agent commands at a shell and show their progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from django.core.management.base import CommandError, OutputWrapper

from accelerators.domain.states import CommandState
from accelerators.models import Command

POLL_INTERVAL_S = 0.25
BAR_WIDTH = 24


def wait_until_ended(command_ids: Sequence[int], out: OutputWrapper) -> list[Command]:
    """Wait until these commands have ended, writing their progress to `out`; return them in the order of their ids.

    `command_ids` are primary keys; they are queried every POLL_INTERVAL_S seconds. Raises CommandError on Ctrl-C; the
    commands continue.
    """
    shown_lines: dict[int, str] = {}
    terminal = out.isatty() and len(command_ids) == 1
    try:
        while True:
            rows = list(Command.objects.filter(pk__in=command_ids).select_related("host").order_by("id"))
            for row in rows:
                if shown_lines.get(row.pk) != (line := _render_line(row, terminal)):
                    shown_lines[row.pk] = line
                    out.write(f"\r\x1b[K{line}" if terminal else line, str, "" if terminal else "\n")
                    out.flush()
            if all(row.ended_at for row in rows):
                if terminal:
                    out.write("")
                return rows
            time.sleep(POLL_INTERVAL_S)
    except KeyboardInterrupt:
        raise CommandError("stopped waiting; the ordered commands continue, see `manage.py command list`") from None


def _render_line(command: Command, terminal: bool) -> str:
    name = f"{command.op} {command.device_name or command.host.name}"
    progress = "" if command.ended_at else command.progress
    if not terminal:
        return (
            f"{name}: {command.state}"
            + (f" {command.percent} %" if command.percent else "")
            + (progress and f" {progress}")
        )
    bar = "#" * (command.percent * BAR_WIDTH // 100)
    return f"{name} [{bar:<{BAR_WIDTH}}] {command.percent:3} % {progress or command.state}"


def has_succeeded(command: Command) -> bool:
    """Return whether the command ended with success."""
    return command.state == CommandState.SUCCEEDED


def command_to_dict(command: Command) -> dict[str, Any]:
    """Return the facts of a command for JSON output."""
    names = ("uuid", "op", "state", "device_name", "actor", "reason", "percent", "progress", "text", "detail")
    times = ("created_at", "started_at", "ended_at")
    facts = {name: getattr(command, name) for name in (*names, *times)}
    return facts | {"host": command.host.name}


def describe_result(command: Command) -> Iterator[str]:
    """Yield lines for people: the result of the command, or its progress if it has not ended, and then its details."""
    text = command.text if command.ended_at else f"{command.percent} % {command.progress}".strip()
    yield f"{command.state}: {text or 'the agent gave no details'}"
    for name, value in sorted(command.detail.items()):
        yield f"{name}:\n{value}" if "\n" in value else f"{name}: {value}"
