"""A request with what Placement and Nova say against it: the list and page of `accelerators`, and that beside it."""

from __future__ import annotations

from typing import Any

from accelerators.admin.requests import AcceleratorRequestAdmin
from accelerators.models import AcceleratorRequest
from cyborgweb.pages import discrepancies
from placement_sync.jobs.discrepancies import of


class RequestPage(AcceleratorRequestAdmin):
    """Registered by `cyborgweb.admin` in place of the room's own."""

    def beside(self, request: AcceleratorRequest) -> dict[str, Any]:
        if request.instance_uuid is None or request.deployable is None:
            return {}
        found = of([request.deployable.device_id])
        return {"faults": discrepancies.shown(one for one in found if one.instance == str(request.instance_uuid))}
