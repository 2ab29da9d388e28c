"""Django models of `accelerators`, one file per subject. All writes go through `accelerators.conductor`."""

from accelerators.models.attachments import Attachment
from accelerators.models.backends import Backend, Service
from accelerators.models.bulks import Bulk, BulkItem
from accelerators.models.commands import Command
from accelerators.models.devices import AttachHandle, Attribute, Deployable, Device, ProviderOwner, ReleasedHandle
from accelerators.models.drivers import DriverWish, HostDriver, Rollout, RolloutStep
from accelerators.models.hosts import Host
from accelerators.models.images import Image, ImageSource
from accelerators.models.records import AuditStatus, Event, Generation, Intent, Seal, Tick
from accelerators.models.requests import AcceleratorRequest, DeviceProfile
from accelerators.models.rules import AdmissionRule

__all__ = [
    "AcceleratorRequest",
    "AdmissionRule",
    "AttachHandle",
    "Attachment",
    "Attribute",
    "AuditStatus",
    "Backend",
    "Bulk",
    "BulkItem",
    "Command",
    "Deployable",
    "Device",
    "DeviceProfile",
    "DriverWish",
    "Event",
    "Generation",
    "Host",
    "HostDriver",
    "Image",
    "ImageSource",
    "Intent",
    "ProviderOwner",
    "ReleasedHandle",
    "Rollout",
    "RolloutStep",
    "Seal",
    "Service",
    "Tick",
]
