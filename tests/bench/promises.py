"""Judge the last run of the bench: it must be of the present product, every row must hold, and every promised time must
have been measured.

Promised times of 5 s and more are asserted in the system lane. Shorter ones are rows of the bench, because a test that
must pass on a busy machine cannot assert them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("accelerators", "agents", "cyborgweb", "drivers", "placement_sync", "templates")
SOURCES = {".py", ".html", ".css", ".js"}
RUN_FIRST = "run `make bench` first, with the same CYBORG_STATE_DIR"

FIRST_START, SECOND_START = "first start to /healthz", "second start to /healthz"
UEVENT = "uevent to GET /v2/devices"
REPORT = "report committed to GET /v2/devices"
COMMAND = "command row to its agent"
POLICY, PROFILE = "policy file edited to the API's answers", "profile deleted to another process's cache"
PROMISED = {
    FIRST_START: "startup",
    SECOND_START: "startup",
    f"{UEVENT}, p50": "uevent",
    f"{UEVENT}, p99": "uevent",
    f"{REPORT}, p50": "whole",
    f"{REPORT}, p99": "whole",
    f"{COMMAND}, p50": "commands",
    f"{COMMAND}, p99": "commands",
    POLICY: "changes",
    PROFILE: "changes",
}
"""The row of each promised time that is shorter than 5 s, and the group of the bench that measures it."""


class NoResultError(Exception):
    """There is no usable result of the bench; the text says what to do."""


def read_result(file: Path) -> list[dict[str, Any]]:
    """Return the rows of `bench.json`; raise NoResultError if it is missing, unusable or older than the product."""
    try:
        rows = json.loads(file.read_text())
        written_at = file.stat().st_mtime
    except FileNotFoundError:
        raise NoResultError(f"there is no {file}: {RUN_FIRST}") from None
    except (OSError, ValueError) as error:
        raise NoResultError(f"{file} cannot be read ({error}): {RUN_FIRST}") from None
    if not isinstance(rows, list) or not rows or not all(_is_row(row) for row in rows):
        raise NoResultError(f"{file} has no rows of a bench: {RUN_FIRST}")
    newest = find_newest_source()
    if newest.stat().st_mtime > written_at:
        raise NoResultError(f"{file} is older than {newest.relative_to(ROOT)}: {RUN_FIRST}")
    return rows


def find_newest_source() -> Path:
    """Return the file of the product that was changed last."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*"))
    return max((file for file in files if file.suffix in SOURCES), key=lambda file: file.stat().st_mtime)


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and {"name", "value", "unit", "bound", "ok"} <= row.keys()


def find_broken(rows: list[dict[str, Any]]) -> list[str]:
    """Return one sentence for each row that does not hold and for each promised time that was not measured."""
    broken = [_describe(row) for row in rows if row["ok"] is not True]
    measured = {row["name"] for row in rows}
    for name, group in PROMISED.items():
        if name not in measured:
            broken.append(f"{name}: not measured (group {group})")
    return broken


def _describe(row: dict[str, Any]) -> str:
    """Return the measured value and the bound; for a row within its bound, the other condition that failed."""
    ratio = row.get("ratio")
    if ratio is not None:
        found, within = f"{ratio:.0%} of {row.get('against', '')}", ratio >= row["bound"]
        bound = f"at least {row['bound']:.0%}"
    else:
        found, within = f"{row['value']:g} {row['unit']}".strip(), row["value"] <= row["bound"]
        bound = f"at most {row['bound']:g} {row['unit']}".strip()
    if within:
        return (
            f"{row['name']}: {found} is within its bound, but: {row.get('note') or 'another condition does not hold'}"
        )
    return f"{row['name']}: {found}, {bound}"
