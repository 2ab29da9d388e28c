"""Every table of the room, one file per subject. Written by `accelerators.conductor` only."""

from accelerators.models.bulks import Bulk, BulkItem
from accelerators.models.commands import Command
from accelerators.models.devices import AttachHandle, Attribute, Deployable, Device
from accelerators.models.hosts import Host
from accelerators.models.images import Image, ImageSource
from accelerators.models.records import Event, Generation, Intent, Tick
from accelerators.models.requests import AcceleratorRequest, DeviceProfile
from accelerators.models.rules import AdmissionRule

__all__ = [
    "AcceleratorRequest",
    "AdmissionRule",
    "AttachHandle",
    "Attribute",
    "Bulk",
    "BulkItem",
    "Command",
    "Deployable",
    "Device",
    "DeviceProfile",
    "Event",
    "Generation",
    "Host",
    "Image",
    "ImageSource",
    "Intent",
    "Tick",
]
