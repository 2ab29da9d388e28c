"""Judge what hostile and slow neighbours cost others: compare latencies with those of control runs. It is pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.fleet.verdict import PromiseLine

Timing = tuple[str, int, int, float, float | None]
"""Host, epoch and seq of a report, when it was sent, and when it was acknowledged (None: never)."""
Sighting = tuple[str, int, int, float]
"""Host, epoch and seq of a report that was seen in the tables, and when."""
NEVER = math.inf
PERCENTS = (50, 99)
RESOLUTION_S = 0.04
"""How exactly the moment is known at which a report becomes visible. A limit is not below this."""


@dataclass(frozen=True)
class Latencies:
    """The durations in seconds of one run; NEVER stands for what did not happen before the end of the run."""

    visible: Sequence[float]
    acknowledged: Sequence[float]
    bound: Sequence[float]

    def by_name(self) -> dict[str, Sequence[float]]:
        """Return the durations by the name under which they are shown."""
        return {"report to visible": self.visible, "acknowledgement": self.acknowledged, "bind": self.bound}


def percentile(durations: Iterable[float], percent: int) -> float:
    """Return the smallest duration that at least `percent` % of all do not exceed; NEVER if there are none."""
    ordered = sorted(durations)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else NEVER


def compute_latencies(
    timings: Iterable[Timing], sightings: Iterable[Sighting], bound: Sequence[float], failed_binds: int = 0
) -> Latencies:
    """Match sent reports with what was seen in the tables. A report is visible when it, or a later one of its host, is
    seen there. A failed bind counts as one that never ended."""
    seen: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for host, epoch, seq, at in sightings:
        seen[host].append((epoch, seq, at))
    visible, acknowledged = [], []
    for host, epoch, seq, sent_at, acknowledged_at in timings:
        acknowledged.append(NEVER if acknowledged_at is None else acknowledged_at - sent_at)
        later = seen[host][bisect_left(seen[host], (epoch, seq, 0.0)) :]
        visible.append(later[0][2] - sent_at if later else NEVER)
    return Latencies(visible, acknowledged, [*bound, *[NEVER] * failed_binds])


def compare_runs(found: Latencies, controls: Mapping[str, Latencies], factor: float | None) -> list[PromiseLine]:
    """Return a line for each latency and each control run: the p99 may be at most `factor` times that of the control.

    Without a factor the lines only report. A control run without samples proves nothing, so its lines do not hold.
    """
    lines = []
    for control_name, control in controls.items():
        for name, durations in found.by_name().items():
            usual = control.by_name()[name]
            ours, theirs = percentile(durations, 99), percentile(usual, 99)
            ratio = ours / max(theirs, RESOLUTION_S if name == "report to visible" else 1e-9)
            text = f"{describe(durations)}, control {describe(usual)}: {ratio:.1f} times"
            holds = factor is None or (math.isfinite(theirs) and ratio <= factor)
            bound = "" if factor is None else f", at most {factor:g} times"
            lines.append(PromiseLine(f"{name}, {control_name}", text + bound, holds, ratio))
    return lines


def describe(durations: Sequence[float]) -> str:
    """Return the percentiles and the number of durations as text."""
    percents = ", ".join(f"p{percent} {_format(percentile(durations, percent))}" for percent in PERCENTS)
    return f"{percents} of {len(durations)}"


def _format(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{seconds * 1000:.0f} ms"


def find_unnamed(pages: Mapping[str, str], wanted: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, str]:
    """Return the culprits that the pages do not name, each with the text that is missing and its page.

    `wanted` says for each culprit which texts stand on which pages: (page, text).
    """
    missing = {}
    for culprit, places in wanted.items():
        absent = [f"{text!r} on {page}" for page, text in places if text not in pages.get(page, "")]
        if absent:
            missing[culprit] = ", ".join(absent)
    return missing


def judge_names(missing: Mapping[str, str], culprits: Iterable[str]) -> list[PromiseLine]:
    """Return a line for each culprit: whether the console names it."""
    return [
        PromiseLine(
            f"console names {culprit}",
            f"lacks {missing[culprit]}" if culprit in missing else "it does",
            culprit not in missing,
        )
        for culprit in culprits
    ]


def judge_refusals(
    outcomes: Mapping[str, Mapping[str, int]], rates: Mapping[str, float], stored_devices: int, max_devices: int
) -> list[PromiseLine]:
    """Return the lines that the hostile load was refused: each attack took place, which its rate of turns shows, and
    had only the expected outcomes; no more devices are stored than allowed."""
    unexpected = {
        attack: {label: count for label, count in counts.items() if label not in EXPECTED[attack] | DISCONNECTED}
        for attack, counts in outcomes.items()
        if attack in EXPECTED
    }
    told = "; ".join(f"{attack}: {found}" for attack, found in unexpected.items() if found)
    idle = [attack for attack in outcomes if not rates[attack]]
    if idle:
        told = f"{told}; no turn of {', '.join(idle)}".removeprefix("; ")
    return [
        PromiseLine("hostile load refused", told or "every attack got only the answers that it should", not told),
        PromiseLine(
            "devices of a hostile host",
            f"{stored_devices} stored, {max_devices} allowed",
            stored_devices <= max_devices,
        ),
    ]


DISCONNECTED = frozenset(
    {"closed", "ConnectionResetError", "BrokenPipeError", "IncompleteReadError", "TimeoutError", "503", "0"}
)
"""Outcomes that every attack may have: it was disconnected, or told to come back."""
EXPECTED: dict[str, frozenset[str]] = {
    "forged": frozenset({"401", "403"}),
    "oversized": frozenset(),
    "no body": frozenset({"408"}),
    "no headers": frozenset({"408"}),
    "trickle": frozenset({"408"}),
    "chunks": frozenset({"404", "400"}),
    "markers": frozenset({"400 as unknown"}),
    "subscribe": frozenset({"webhook 201", "crafted 400", "test 409", "test 202", "test 200", "test 201"}),
}
"""For each attack that must be refused, the answers that it may get."""
