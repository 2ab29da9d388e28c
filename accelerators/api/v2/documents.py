"""The two documents that need no authentication: the service description and its one version (contract 1.2, 1.3)."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments
from accelerators.api.v2.versions import MAXIMUM, MINIMUM, text
from accelerators.api.v2.views import View

NAME = "OpenStack Cyborg API"
DESCRIPTION = (
    "Cyborg is the OpenStack project for lifecycle management of hardware accelerators, "
    "such as GPUs,FPGAs, AI chips, security accelerators, etc."
)


class Public(View):
    """A view without authentication. A token that is sent is ignored."""

    authentication_classes = []
    permission_classes = []


class Root(Public):
    """`GET /`: always 200 and JSON. Microversion headers are ignored, even invalid ones."""

    microversioned = False

    def get(self, request: Request) -> Response:
        """Return the service's name, description and versions."""
        arguments.only(request.query_params.lists())
        version = {
            "id": "v2",
            "status": "CURRENT",
            "max_version": text(MAXIMUM),
            "min_version": text(MINIMUM),
            "links": [{"href": f"{self.base}/accelerator/v2", "rel": "self"}],
        }
        return Response({"name": NAME, "description": DESCRIPTION, "versions": [version], "default_version": version})


class V2(Public):
    """`GET /v2`: not wrapped, because keystoneauth looks for `id` at the top level. Its link ends in a slash."""

    def get(self, request: Request) -> Response:
        """Return the description of version 2."""
        arguments.only(request.query_params.lists())
        return Response(
            {
                "id": "v2.0",
                "links": [{"href": f"{self.base}/accelerator/v2/", "rel": "self"}],
                "max_version": text(MAXIMUM),
                "min_version": text(MINIMUM),
                "status": "CURRENT",
            }
        )
