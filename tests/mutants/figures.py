"""Format the results of a run as Markdown: a table by area, and the surviving mutants."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutants.areas import AREAS

COLUMNS = ("killed", "survived", "timeout", "equivalent")
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True)
class Run:
    """The run that the table describes: seed, commit, size of the sample, and number of mutants of each area."""

    seed: int
    commit: str
    sample: int
    all_counts: dict[str, int]


@cache
def _equivalents() -> dict[tuple[str, tuple[str, ...]], str]:
    """Load the known equivalent mutants: (file, changed lines) → why no test can detect it."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", []) if EQUIVALENT.exists() else []
    return {(e["path"], tuple(line.strip() for line in e["diff"].strip().splitlines())): e["why"] for e in entries}


def reason(result: dict[str, Any]) -> str:
    """Return why a survivor is equivalent; '' if it is not known to be."""
    lines = tuple(f"{line[0]}{line[1:].strip()}" for line in result["diff"])
    stripped = {
        (path, tuple(f"{x[0]}{x[1:].strip()}" for x in diff)): why for (path, diff), why in _equivalents().items()
    }
    return stripped.get((result["path"], lines), "")


def verdict(result: dict[str, Any]) -> str:
    """Return the outcome of a mutant, one of `COLUMNS`."""
    if result["outcome"] == "survived" and reason(result):
        return "equivalent"
    return str(result["outcome"])


def table(run: Run, results: list[dict[str, Any]]) -> str:
    """Return the table by area, with the share of non-equivalent mutants that a failure or a time limit detected."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0))
    for result in results:
        counts[result["area"]][verdict(result)] += 1
    rows = [_row(area.name, run.all_counts.get(area.name, 0), counts[area.name]) for area in AREAS]
    total = {column: sum(count[column] for count in counts.values()) for column in COLUMNS}
    rows.append(_row("**all**", sum(run.all_counts.values()), total))
    capped = sum(bool(result["left_out"]) for result in results if result["outcome"] == "survived")
    return "\n".join(
        (
            f"Seed {run.seed}, commit `{run.commit}`, {len(results)} of a sample of {run.sample} mutants tested.",
            "",
            "| area | mutants | tried | killed | survived | timeout | equivalent | noticed |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "*noticed*: killed or timeout, of those tried that are not equivalent."
            f" {capped} of the survivors were not shown to all tests that execute them (the limit for each mutant).",
        )
    )


def _row(name: str, everything: int, count: dict[str, int]) -> str:
    tried = sum(count.values())
    real = tried - count["equivalent"]
    share = f"{100 * (count['killed'] + count['timeout']) / real:.0f} %" if real else "–"
    return f"| {name} | {everything} | {tried} | " + " | ".join(str(count[c]) for c in COLUMNS) + f" | {share} |"


def survivors(results: list[dict[str, Any]]) -> str:
    """List each survivor with its place and diff, then the equivalent ones with the reason."""
    lines = []
    for wanted in ("survived", "equivalent"):
        found = sorted((r for r in results if verdict(r) == wanted), key=lambda r: (r["area"], r["path"], r["line"]))
        lines += [f"### {wanted.capitalize()}: {len(found)}", ""] if found else []
        for result in found:
            note = f": {reason(result)}" if wanted == "equivalent" else f" ({result['tests']} tests)"
            lines += [f"* {result['area']}, `{result['path']}:{result['line']}`{note}", ""]
            lines += ["  ```diff", *(f"  {line}" for line in result["diff"]), "  ```", ""]
    return "\n".join(lines)
