"""Discrepancies with Placement and Nova, as the pages of hosts, devices and requests show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerators.ui import badges
from placement_sync.jobs.discrepancies import DiscrepancySummary


def render_discrepancies(discrepancies: Iterable[DiscrepancySummary]) -> list[dict[str, Any]]:
    """Return the discrepancies as the template `accelerators/faults.html` needs them."""
    return [
        {
            "kind": badges.render_choice(one.kind),
            "since": badges.render_relative_time(one.since),
            "said": one.explanation,
        }
        for one in discrepancies
    ]
