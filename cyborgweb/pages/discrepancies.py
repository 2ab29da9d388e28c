"""Discrepancies with Placement and Nova, as the pages of hosts, devices and requests show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerators.ui import badges
from placement_sync.jobs.discrepancies import Found


def shown(found: Iterable[Found]) -> list[dict[str, Any]]:
    """Return the discrepancies as the template `accelerators/faults.html` needs them."""
    return [{"kind": badges.mark(one.kind, "bad"), "since": badges.ago(one.since), "said": one.said} for one in found]
