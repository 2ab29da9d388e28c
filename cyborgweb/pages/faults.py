"""What Placement and Nova contradict, as the pages of hosts, devices and requests show it. Called by those pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerators.admin import marks
from placement_sync.faults import Found


def shown(found: Iterable[Found]) -> list[dict[str, Any]]:
    """For `accelerators/faults.html`."""
    return [{"kind": marks.mark(one.kind, "bad"), "since": marks.ago(one.since), "said": one.said} for one in found]
