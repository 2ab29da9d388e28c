"""What Placement and Nova contradict, as the pages of hosts, devices and requests show it. Called by those pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerators.ui import badges
from placement_sync.jobs.discrepancies import Found


def shown(found: Iterable[Found]) -> list[dict[str, Any]]:
    """For `accelerators/faults.html`."""
    return [{"kind": badges.mark(one.kind, "bad"), "since": badges.ago(one.since), "said": one.said} for one in found]
