"""`/v2/attributes` (contract section 2.6). Attributes created here belong to the operator, and reports do not change
them."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments, bodies
from accelerators.api.v2.faults import V2Error, bad_input_error, missing_argument_error
from accelerators.api.v2.resource import V2Resource, make_links_column, make_plain_column, make_time_column
from accelerators.api.v2.views import V2DetailView, V2ListView, V2View
from accelerators.inventory import attributes

_INTEGER = re.compile(r"[0-9]{1,18}")

ATTRIBUTES = V2Resource(
    name="attributes",
    noun="Attribute",
    alias="a",
    tables="accelerators_attribute a",
    visible_condition="TRUE",
    columns=(
        make_plain_column("uuid", "a.uuid"),
        make_plain_column("deployable_id", "a.deployable_id"),
        make_plain_column("key", "a.key"),
        make_plain_column("value", "a.value"),
        make_time_column("created_at", "a.created_at"),
        make_time_column("updated_at", "a.updated_at"),
        make_links_column("a.uuid", self="/accelerator/v2/attributes/"),
    ),
)


class AttributeMethods(V2View):
    """POST and DELETE, which the collection and its members share. POST ignores a uuid in the path."""

    resource = ATTRIBUTES
    allow_header = "DELETE, GET, POST"
    policy_rules = {
        "GET": "cyborg:attribute:get_all",
        "POST": "cyborg:attribute:create",
        "DELETE": "cyborg:attribute:delete",
    }

    def post(self, request: Request, uuid: str = "") -> Response:
        """Create an attribute; 201. The body may be bare, or wrapped as openstacksdk sends it.

        If the key exists already, that attribute becomes the operator's. 400 for an invalid body, 404 if there is no
        such deployable, 409 for an attribute that programming has written.
        """
        arguments.parse_known_arguments(request.query_params.lists())
        body = bodies.read_json_body(request, "req_attr")
        if isinstance(body, dict) and isinstance(body.get("attribute"), dict):
            body = body["attribute"]
        bodies.check_condition(
            isinstance(body, dict), "An attribute must be an object with deployable_id, key and value."
        )
        made = attributes.set_operator_attribute(
            _parse_deployable_id(body.get("deployable_id")),
            bodies.check_text(body.get("key"), "key"),
            bodies.check_text(body.get("value"), "value", attributes.MAX_VALUE, 0),
            self.caller,
        )
        return Response(ATTRIBUTES.fetch_one(str(made), self.version, self.base_url), 201)

    def delete(self, request: Request, uuid: str = "") -> Response:
        """Delete an attribute, named in the path or in `?uuid=`; 204. If the agent reports it, its next report brings
        it back.

        400 without a uuid, 404 if there is no such attribute, 409 for an attribute that programming has written.
        """
        given = arguments.parse_known_arguments(request.query_params.lists(), *(() if uuid else ("uuid",)))
        attribute_uuid = uuid or given.get("uuid")
        if not attribute_uuid:
            raise missing_argument_error("uuid")
        if not arguments.is_canonical_uuid(attribute_uuid):
            raise V2Error(404, f"Attribute not found with uuid={attribute_uuid}")
        attributes.remove_attribute(UUID(attribute_uuid), self.caller)
        return Response(None, 204)


class AttributeList(AttributeMethods, V2ListView):
    """`GET /v2/attributes?deployable_id=&key=`."""

    def get(self, request: Request) -> Response:
        """Return all attributes, or those of the deployable `deployable_id` (0 means all deployables), with the key
        `key`, or both. 400 for an invalid query."""
        query, given = arguments.parse_page_query(request.query_params.lists(), ("deployable_id", "key"))
        of = _parse_deployable_id(given.get("deployable_id", "0"))
        condition = "(%(of)s = 0 OR a.deployable_id = %(of)s) AND (%(key)s::text IS NULL OR a.key = %(key)s)"
        return Response(
            ATTRIBUTES.fetch_list(query, self.version, self.base_url, condition, of=of, key=given.get("key"))
        )


class AttributeDetail(AttributeMethods, V2DetailView):
    """`GET /v2/attributes/{uuid}`. The body is the attribute itself, not `{"attribute": {...}}`."""

    policy_rules = AttributeMethods.policy_rules | {"GET": "cyborg:attribute:get_one"}


def _parse_deployable_id(value: Any) -> int:
    """Return the id of a deployable from an integer or a text of digits; raise V2Error 400 for anything else.

    0 is accepted. Whether the deployable exists is not checked.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18:
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    raise bad_input_error("deployable_id", str(value)[:64], "It must be an integer, 0 or more.")
