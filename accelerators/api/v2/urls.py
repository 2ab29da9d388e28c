"""The routes of v2, relative to where `cyborgweb.urls` mounts them (contract section 1.4).

`/devices` is the same as `/v2/devices`. A trailing slash and a `.json` suffix are ignored. All other addresses are
answered with 404 or 405.
"""

from __future__ import annotations

from django.urls import URLPattern, re_path
from rest_framework.views import APIView

from accelerators.api.v2.attributes import AttributeDetail, AttributeList
from accelerators.api.v2.deployables import DeployableDetail, DeployableList, DeployableProgram
from accelerators.api.v2.devices import ActionWithoutDevice, DeviceDetail, DeviceDisable, DeviceEnable, DeviceList
from accelerators.api.v2.documents import VersionsView, VersionView
from accelerators.api.v2.profiles import ProfileDetail, ProfileList
from accelerators.api.v2.requests import RequestDetail, RequestList
from accelerators.api.v2.views import V2NotFoundView

_PATH_END = r"(?:\.json)?/?\Z"
_UUID_SEGMENT = r"/(?P<uuid>[^/]+?)"


def _make_route(path: str, view: type[APIView]) -> URLPattern:
    """Return the route of a view, with or without `v2/` before `path`; a `.json` suffix and a slash may follow it."""
    return re_path(rf"\A(?:v2/)?{path}{_PATH_END}", view.as_view())


urlpatterns = [
    re_path(r"\A\Z", VersionsView.as_view()),
    re_path(rf"\Av2{_PATH_END}", VersionView.as_view()),
    _make_route("device_profiles", ProfileList),
    _make_route(r"device_profiles/(?P<value>[^/]+?)", ProfileDetail),
    _make_route("accelerator_requests", RequestList),
    _make_route(f"accelerator_requests{_UUID_SEGMENT}", RequestDetail),
    _make_route("devices", DeviceList),
    _make_route("devices/(?P<uuid>enable|disable)", ActionWithoutDevice),
    _make_route(f"devices{_UUID_SEGMENT}", DeviceDetail),
    _make_route(f"devices{_UUID_SEGMENT}/enable", DeviceEnable),
    _make_route(f"devices{_UUID_SEGMENT}/disable", DeviceDisable),
    _make_route("deployables", DeployableList),
    _make_route(f"deployables{_UUID_SEGMENT}", DeployableDetail),
    _make_route(f"deployables{_UUID_SEGMENT}/program(?:/[^/]+)?", DeployableProgram),
    _make_route("attributes", AttributeList),
    _make_route(f"attributes{_UUID_SEGMENT}", AttributeDetail),
    re_path("", V2NotFoundView.as_view()),
]
