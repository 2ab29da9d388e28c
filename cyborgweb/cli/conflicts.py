"""Show what a change of settings will do, and, if it is refused, what somebody else has changed meanwhile."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from cyborgweb.cli.exit_codes import CliError, to_printable_line
from cyborgweb.cli.options import choose_generation


@contextmanager
def show_conflict(
    compare: Callable[[dict[str, Any]], tuple[Any, Any]], present: dict[str, Any] | None
) -> Iterator[None]:
    """Print what the change in the `with` block will do to the row `present`, and, if the change is refused because
    somebody else made one, what it would do now; the CliError is raised again.

    `compare` returns the present version and the wanted one, given a row as the API shows it. A difference that is
    printed already is not repeated. For a change of several rows, `present` is None.
    """
    shown = None if present is None else show_changes(*compare(present))
    try:
        yield
    except CliError as refused:
        if refused.current and (present is None or list_differences(*compare(refused.current)) != shown):
            show_changes(*compare(refused.current))
        raise


@contextmanager
def change_based_on(
    present: dict[str, Any], changes: Mapping[str, Any], generation: int | None
) -> Iterator[dict[str, int]]:
    """Print what `changes` will do to the row `present`, and yield the field `generation` for the request.

    If the request is refused because somebody else changed the row, the difference is printed, as `show_conflict` does.
    """
    wanted = {**present, **changes}
    with show_conflict(lambda current: (current, wanted), present):
        yield {"generation": choose_generation(present, generation)}


def show_changes(present: Any, wanted: Any) -> list[str]:
    """Print on standard error what a change will do, nothing if it changes nothing, and return the lines."""
    lines = list_differences(present, wanted)
    for line in lines:
        click.echo(to_printable_line(line), err=True)
    return lines


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
