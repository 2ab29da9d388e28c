"""The routes of v2, relative to where `cyborgweb.urls` mounts them (contract section 1.4).

`/devices` is `/v2/devices`; a trailing slash and a `.json` suffix make no difference; everything else is `Nowhere`.
"""

from __future__ import annotations

from django.urls import URLPattern, re_path
from rest_framework.views import APIView

from accelerators.api.v2.deployables import DeployableDetail, DeployableList
from accelerators.api.v2.devices import DeviceDetail, DeviceList
from accelerators.api.v2.documents import V2, Root
from accelerators.api.v2.views import Nowhere

_END = r"(?:\.json)?/?\Z"
_MEMBER = r"/(?P<uuid>[^/]+?)"


def _route(path: str, view: type[APIView]) -> URLPattern:
    return re_path(rf"\A(?:v2/)?{path}{_END}", view.as_view())


urlpatterns = [
    re_path(r"\A\Z", Root.as_view()),
    re_path(rf"\Av2{_END}", V2.as_view()),
    _route("devices", DeviceList),
    _route(f"devices{_MEMBER}", DeviceDetail),
    _route("deployables", DeployableList),
    _route(f"deployables{_MEMBER}", DeployableDetail),
    re_path("", Nowhere.as_view()),
]
