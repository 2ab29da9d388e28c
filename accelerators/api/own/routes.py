"""The resources of this room by name; `cyborgweb.api` mounts them with those of other rooms."""

from __future__ import annotations

from collections.abc import Mapping

from accelerators.api.own.commands import CommandView
from accelerators.api.own.demand import AcceleratorView, RequestView
from accelerators.api.own.images import ImageView
from accelerators.api.own.inventory import AttachHandleView, DeployableView, DeviceView, HostView
from accelerators.api.own.profiles import ProfileView
from accelerators.api.own.records import EventView
from accelerators.api.own.rules import RuleView
from accelerators.api.own.views import Collection

RESOURCES: Mapping[str, type[Collection]] = {
    "hosts": HostView,
    "devices": DeviceView,
    "deployables": DeployableView,
    "attach_handles": AttachHandleView,
    "accelerators": AcceleratorView,
    "requests": RequestView,
    "profiles": ProfileView,
    "rules": RuleView,
    "commands": CommandView,
    "images": ImageView,
    "events": EventView,
}
