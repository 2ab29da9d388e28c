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
from accelerators.api.v2.documents import V2, Root
from accelerators.api.v2.profiles import ProfileDetail, ProfileList
from accelerators.api.v2.requests import RequestDetail, RequestList
from accelerators.api.v2.views import Nowhere

_END = r"(?:\.json)?/?\Z"
_MEMBER = r"/(?P<uuid>[^/]+?)"


def _route(path: str, view: type[APIView]) -> URLPattern:
    return re_path(rf"\A(?:v2/)?{path}{_END}", view.as_view())


urlpatterns = [
    re_path(r"\A\Z", Root.as_view()),
    re_path(rf"\Av2{_END}", V2.as_view()),
    _route("device_profiles", ProfileList),
    _route(r"device_profiles/(?P<value>[^/]+?)", ProfileDetail),
    _route("accelerator_requests", RequestList),
    _route(f"accelerator_requests{_MEMBER}", RequestDetail),
    _route("devices", DeviceList),
    _route("devices/(?P<uuid>enable|disable)", ActionWithoutDevice),
    _route(f"devices{_MEMBER}", DeviceDetail),
    _route(f"devices{_MEMBER}/enable", DeviceEnable),
    _route(f"devices{_MEMBER}/disable", DeviceDisable),
    _route("deployables", DeployableList),
    _route(f"deployables{_MEMBER}", DeployableDetail),
    _route(f"deployables{_MEMBER}/program(?:/[^/]+)?", DeployableProgram),
    _route("attributes", AttributeList),
    _route(f"attributes{_MEMBER}", AttributeDetail),
    re_path("", Nowhere.as_view()),
]
