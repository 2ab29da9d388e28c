"""Show what a change of settings will do, and, if it is refused, what somebody else has changed meanwhile."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import CliError, to_printable_line
from cyborgweb.cli.options import choose_generation


@contextmanager
def show_conflict(compare: Callable[[dict[str, Any]], tuple[Any, Any]]) -> Iterator[None]:
    """Print the difference between the present version and the wanted one if the change is refused because somebody
    else made one; the CliError is raised again.

    `compare` returns both versions, given the present row as the API shows it.
    """
    try:
        yield
    except CliError as refused:
        if refused.current:
            show_changes(*compare(refused.current))
        raise


@contextmanager
def change_based_on(
    api: ApiClient, path: str, changes: Mapping[str, Any], generation: int | None
) -> Iterator[dict[str, int]]:
    """Read the row at `path`, print what `changes` will do to it, and yield the field `generation` for the request.

    If the request is refused because somebody else changed the row, the difference is printed, as `show_conflict` does.
    """
    present = api.get(path)
    wanted = {**present, **changes}
    show_changes(present, wanted)
    with show_conflict(lambda current: (current, wanted)):
        yield {"generation": choose_generation(present, generation)}


def show_changes(present: Any, wanted: Any) -> None:
    """Print on standard error what a change will do; nothing if it changes nothing."""
    for line in list_differences(present, wanted):
        click.echo(to_printable_line(line), err=True)


def list_differences(present: Any, wanted: Any) -> list[str]:
    """Return the lines of a unified diff from the present version to the wanted one; both are written as JSON."""
    before, after = (json.dumps(one, indent=2, sort_keys=True).splitlines() for one in (present, wanted))
    return [*difflib.unified_diff(before, after, "present version", "your version", lineterm="")]


def edit_settings(settings: Mapping[str, Any], to_set: Mapping[str, Any], to_unset: Sequence[str]) -> dict[str, Any]:
    """Return the settings after changes of single ones, as the service applies them; wrong paths are left out."""
    edited: dict[str, Any] = copy.deepcopy(dict(settings))
    for path in (*to_set, *to_unset):
        *tables, name = path.split("/")
        parent: Any = edited
        for table in tables:
            parent = parent.setdefault(table, {}) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop(name, None)
            parent |= {name: to_set[path]} if path in to_set else {}
    return edited
