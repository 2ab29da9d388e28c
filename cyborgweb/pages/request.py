"""The list and page of requests, with discrepancies with Placement and Nova added."""

from __future__ import annotations

from typing import Any

from accelerators.admin.requests import AcceleratorRequestAdmin
from accelerators.models import AcceleratorRequest
from cyborgweb.pages import discrepancies
from placement_sync.jobs.discrepancies import list_discrepancies_of_devices


class RequestPage(AcceleratorRequestAdmin):
    """Registered in place of the `accelerators` app's own admin."""

    def get_extra_context(self, request: AcceleratorRequest) -> dict[str, Any]:
        if request.instance_uuid is None or request.deployable is None:
            return {}
        device_discrepancies = list_discrepancies_of_devices([request.deployable.device_id])
        return {
            "faults": discrepancies.render_discrepancies(
                one for one in device_discrepancies if one.instance == str(request.instance_uuid)
            )
        }
