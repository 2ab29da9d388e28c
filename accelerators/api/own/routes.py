"""The resources of this package by name. `cyborgweb.api` mounts them together with those of other packages."""

from __future__ import annotations

from collections.abc import Mapping

from accelerators.api.own.accelerators import AcceleratorView
from accelerators.api.own.admission_rules import RuleView
from accelerators.api.own.attachments import AttachmentView
from accelerators.api.own.backends import BackendView, ServiceView
from accelerators.api.own.bulk_actions import BulkActionView, BulkResultView
from accelerators.api.own.commands import CommandView
from accelerators.api.own.drivers import DriverView
from accelerators.api.own.events import EventView, SealView
from accelerators.api.own.images import ImageView
from accelerators.api.own.inventory import AttachHandleView, DeployableView, DeviceView, HostView
from accelerators.api.own.profiles import ProfileView
from accelerators.api.own.requests import RequestView
from accelerators.api.own.rollouts import RolloutView
from accelerators.api.own.views import CollectionView

RESOURCES: Mapping[str, type[CollectionView]] = {
    "hosts": HostView,
    "drivers": DriverView,
    "rollouts": RolloutView,
    "backends": BackendView,
    "services": ServiceView,
    "devices": DeviceView,
    "bulk_actions": BulkActionView,
    "bulk_results": BulkResultView,
    "deployables": DeployableView,
    "attach_handles": AttachHandleView,
    "accelerators": AcceleratorView,
    "attachments": AttachmentView,
    "requests": RequestView,
    "profiles": ProfileView,
    "rules": RuleView,
    "commands": CommandView,
    "images": ImageView,
    "events": EventView,
    "seals": SealView,
}
