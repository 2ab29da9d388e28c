"""`/v2/attributes` (contract section 2.6). Attributes created here belong to the operator, and reports do not change
them."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments, bodies
from accelerators.api.v2.faults import V2Error, bad_input, missing_argument
from accelerators.api.v2.resource import Resource, links, moment, plain
from accelerators.api.v2.views import DetailView, ListView, View
from accelerators.inventory import attributes

_INTEGER = re.compile(r"[0-9]{1,18}")

ATTRIBUTES = Resource(
    name="attributes",
    noun="Attribute",
    alias="a",
    tables="accelerators_attribute a",
    shown="TRUE",
    columns=(
        plain("uuid", "a.uuid"),
        plain("deployable_id", "a.deployable_id"),
        plain("key", "a.key"),
        plain("value", "a.value"),
        moment("created_at", "a.created_at"),
        moment("updated_at", "a.updated_at"),
        links("a.uuid", self="/accelerator/v2/attributes/"),
    ),
)


class Attributes(View):
    """The methods that the collection and its members share."""

    resource = ATTRIBUTES
    allow = "DELETE, GET, POST"
    policy_rules = {
        "GET": "cyborg:attribute:get_all",
        "POST": "cyborg:attribute:create",
        "DELETE": "cyborg:attribute:delete",
    }

    def post(self, request: Request, uuid: str = "") -> Response:
        """Create an attribute; 201. The body may be bare, or wrapped as openstacksdk sends it. If the key exists
        already, that attribute becomes the operator's."""
        arguments.only(request.query_params.lists())
        body = bodies.read(request, "req_attr")
        if isinstance(body, dict) and isinstance(body.get("attribute"), dict):
            body = body["attribute"]
        bodies.shape(isinstance(body, dict), "An attribute must be an object with deployable_id, key and value.")
        made = attributes.put(
            _integer(body.get("deployable_id")),
            bodies.text(body.get("key"), "key"),
            bodies.text(body.get("value"), "value", attributes.MAX_VALUE, 0),
            request.user,
        )
        return Response(ATTRIBUTES.find(str(made), self.version, self.base), 201)

    def delete(self, request: Request, uuid: str = "") -> Response:
        """Delete an attribute, named in the path or in `?uuid=`; 204."""
        given = arguments.only(request.query_params.lists(), *(() if uuid else ("uuid",)))
        named = uuid or given.get("uuid")
        if not named:
            raise missing_argument("uuid")
        if not arguments.stored(named):
            raise V2Error(404, f"Attribute not found with uuid={named}")
        attributes.remove(UUID(named), request.user)
        return Response(None, 204)


class AttributeList(Attributes, ListView):
    """`GET /v2/attributes?deployable_id=&key=`."""

    def get(self, request: Request) -> Response:
        """Return all attributes, or those of a deployable (0 means all deployables) or with a key."""
        query, given = arguments.page(request.query_params.lists(), ("deployable_id", "key"))
        of = _integer(given.get("deployable_id", "0"))
        also = "(%(of)s = 0 OR a.deployable_id = %(of)s) AND (%(key)s::text IS NULL OR a.key = %(key)s)"
        return Response(ATTRIBUTES.list(query, self.version, self.base, also, of=of, key=given.get("key")))


class AttributeDetail(Attributes, DetailView):
    """`GET /v2/attributes/{uuid}`: not wrapped."""

    policy_rules = Attributes.policy_rules | {"GET": "cyborg:attribute:get_one"}


def _integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18:
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    raise bad_input("deployable_id", str(value)[:64], "It must be an integer, 0 or more.")
