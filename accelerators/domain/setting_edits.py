"""Change single settings of a driver, and leave all others as they are."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerators.domain.errors import RefusalReason, RefusedError

PATH_SEPARATOR = "/"
MAX_EDITS = 64
_PATH = re.compile(r"[^/]+(/[^/]+)*")


@dataclass(frozen=True)
class SettingEdits:
    """Settings to set and to delete. A path is the names of a setting and of the tables around it, joined by `/`."""

    set: Mapping[str, Any] = field(default_factory=dict)
    unset: Sequence[str] = ()

    def __bool__(self) -> bool:
        """Return True if there is anything to change."""
        return bool(self.set or self.unset)


NO_EDITS = SettingEdits()


def check_edits(edits: SettingEdits) -> None:
    """Raise RefusedError INVALID for more than MAX_EDITS changes, a wrong path, or paths that overlap."""
    paths = [*edits.set, *edits.unset]
    if len(paths) > MAX_EDITS:
        raise RefusedError(RefusalReason.INVALID, f"At most {MAX_EDITS} settings are changed at once.")
    for path in paths:
        if not _PATH.fullmatch(path) or len(path) > 1000:
            text = f"{path[:200]!r} is no path: join the names of tables and of the setting by {PATH_SEPARATOR}."
            raise RefusedError(RefusalReason.INVALID, text)
    ordered = sorted(path.split(PATH_SEPARATOR) for path in paths)
    for first, second in itertools.pairwise(ordered):
        if second[: len(first)] == first:
            raise RefusedError(RefusalReason.INVALID, f"{'/'.join(second)[:200]} is changed by more than one edit.")


def apply_edits(settings: Mapping[str, Any], edits: SettingEdits) -> dict[str, Any]:
    """Return a copy of the settings with the edits. A setting to delete that does not exist is ignored.

    Raises RefusedError INVALID if a path leads through a value that is no table.
    """
    edited: dict[str, Any] = copy.deepcopy(dict(settings))
    for path, value in edits.set.items():
        *tables, name = path.split(PATH_SEPARATOR)
        target = edited
        for number, table in enumerate(tables):
            target = target.setdefault(table, {})
            if not isinstance(target, dict):
                shown = PATH_SEPARATOR.join(tables[: number + 1])[:200]
                raise RefusedError(RefusalReason.INVALID, f"{shown} is a single value, not a table of settings.")
        target[name] = value
    for path in edits.unset:
        *tables, name = path.split(PATH_SEPARATOR)
        parent: Any = edited
        for table in tables:
            parent = parent.get(table) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop(name, None)
    return edited
