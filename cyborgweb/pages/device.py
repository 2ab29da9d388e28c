"""A device with what Placement and Nova say against it, and how busy it is: the list and page of `accelerators`, and
that beside it."""

from __future__ import annotations

from typing import Any

from accelerators.admin.devices import DeviceAdmin
from accelerators.models import Device
from cyborgweb.pages import discrepancies, load
from placement_sync.jobs.discrepancies import of


class DevicePage(DeviceAdmin):
    """Registered by `cyborgweb.admin` in place of the room's own."""

    def beside(self, device: Device) -> dict[str, Any]:
        return {"faults": discrepancies.shown(of([device.pk])), "load": load.of_device(device)}
