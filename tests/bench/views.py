"""The ceilings of the API, served by the product's process: they use the same server, tokens and renderer.

They are plain DRF views: they authenticate and authorize the caller, run one statement and return its result.
"""

from __future__ import annotations

from uuid import UUID

from django.db import connection
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from accelerators.api.json import JsonRenderer
from cyborgweb.urls import urlpatterns as product

AGGREGATE = """
SELECT json_build_object('devices', json_agg(d))::text FROM (
  SELECT d.uuid, d.type, d.vendor, d.model, d.std_board_info, d.vendor_board_info, h.name AS hostname, d.created_at,
    d.updated_at
  FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id ORDER BY d.id) AS d
"""
INDEXED = """
SELECT uuid, state, group_id, hostname, device_rp_uuid, instance_uuid, project_id, created_at, updated_at
FROM accelerators_acceleratorrequest WHERE instance_uuid = %s
"""


class Aggregate(APIView):
    """Return PostgreSQL's json_agg of the stored columns of all devices, unchanged."""

    renderer_classes = [JsonRenderer]
    policy_rules = {"GET": "cyborg:device:get_all"}

    def get(self, request: Request) -> Response:
        """List all devices."""
        with connection.cursor() as cursor:
            cursor.execute(AGGREGATE)
            return Response(cursor.fetchone()[0].encode())


class Indexed(APIView):
    """Run one query by the index of `instance_uuid` and return its rows unchanged."""

    renderer_classes = [JsonRenderer]
    policy_rules = {"GET": "cyborg:arq:get_all"}

    def get(self, request: Request, instance: UUID) -> Response:
        """List the requests of an instance."""
        with connection.cursor() as cursor:
            cursor.execute(INDEXED, [instance])
            names = [column.name for column in cursor.description or ()]
            return Response({"arqs": [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]})


urlpatterns = [path("bench/devices", Aggregate.as_view()), path("bench/requests/<uuid:instance>", Indexed.as_view())]
urlpatterns += product
