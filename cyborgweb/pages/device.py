"""The list and page of devices, with discrepancies with Placement and Nova and the device's load added."""

from __future__ import annotations

from typing import Any

from accelerators.admin.devices import DeviceAdmin
from accelerators.models import Device
from cyborgweb.pages import discrepancies, load
from placement_sync.jobs.discrepancies import list_discrepancies_of_devices


class DevicePage(DeviceAdmin):
    """Registered in place of the `accelerators` app's own admin."""

    def get_extra_context(self, device: Device) -> dict[str, Any]:
        return {
            "faults": discrepancies.render_discrepancies(list_discrepancies_of_devices([device.pk])),
            "load": load.build_device_load(device),
        }
