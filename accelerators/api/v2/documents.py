"""The two documents that need no authentication: the service description and its one version (contract 1.2, 1.3)."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments
from accelerators.api.v2.versions import MAX_VERSION, MIN_VERSION, format_version
from accelerators.api.v2.views import V2View

SERVICE_NAME = "OpenStack Cyborg API"
SERVICE_DESCRIPTION = (
    "Cyborg is the OpenStack project for lifecycle management of hardware accelerators, "
    "such as GPUs,FPGAs, AI chips, security accelerators, etc."
)


class PublicV2View(V2View):
    """A view without authentication. A token that is sent is ignored."""

    authentication_classes = []
    permission_classes = []


class VersionsView(PublicV2View):
    """`GET /`: the service description, with status 200. Microversion headers are ignored, even invalid ones."""

    has_microversions = False

    def get(self, request: Request) -> Response:
        """Return the service's name, description and versions; 400 for any query parameter."""
        arguments.parse_known_arguments(request.query_params.lists())
        version = {
            "id": "v2",
            "status": "CURRENT",
            "max_version": format_version(MAX_VERSION),
            "min_version": format_version(MIN_VERSION),
            "links": [{"href": f"{self.base_url}/accelerator/v2", "rel": "self"}],
        }
        return Response(
            {
                "name": SERVICE_NAME,
                "description": SERVICE_DESCRIPTION,
                "versions": [version],
                "default_version": version,
            }
        )


class VersionView(PublicV2View):
    """`GET /v2`: not wrapped, because keystoneauth looks for `id` at the top level. Its link ends in a slash."""

    def get(self, request: Request) -> Response:
        """Return the description of version 2; 400 for any query parameter."""
        arguments.parse_known_arguments(request.query_params.lists())
        return Response(
            {
                "id": "v2.0",
                "links": [{"href": f"{self.base_url}/accelerator/v2/", "rel": "self"}],
                "max_version": format_version(MAX_VERSION),
                "min_version": format_version(MIN_VERSION),
                "status": "CURRENT",
            }
        )
