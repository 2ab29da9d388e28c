"""The list and page of devices, with discrepancies with Placement and Nova and the device's load added."""

from __future__ import annotations

from typing import Any

from accelerators.admin.devices import DeviceAdmin
from accelerators.models import Device
from cyborgweb.pages import discrepancies, load
from placement_sync.jobs.discrepancies import of


class DevicePage(DeviceAdmin):
    """Registered in place of the `accelerators` app's own admin."""

    def beside(self, device: Device) -> dict[str, Any]:
        return {"faults": discrepancies.shown(of([device.pk])), "load": load.of_device(device)}
