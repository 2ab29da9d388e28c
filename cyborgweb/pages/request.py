"""The list and page of requests, with discrepancies with Placement and Nova added."""

from __future__ import annotations

from typing import Any

from accelerators.admin.requests import AcceleratorRequestAdmin
from accelerators.models import AcceleratorRequest
from cyborgweb.pages import discrepancies
from placement_sync.jobs.discrepancies import of


class RequestPage(AcceleratorRequestAdmin):
    """Registered in place of the `accelerators` app's own admin."""

    def beside(self, request: AcceleratorRequest) -> dict[str, Any]:
        if request.instance_uuid is None or request.deployable is None:
            return {}
        found = of([request.deployable.device_id])
        return {"faults": discrepancies.shown(one for one in found if one.instance == str(request.instance_uuid))}
