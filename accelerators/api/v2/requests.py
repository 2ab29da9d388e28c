"""`/v2/accelerator_requests` (contract section 2.3): Nova creates, binds, reads and deletes accelerator requests
here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments, bodies, patches
from accelerators.api.v2.faults import V2Error
from accelerators.api.v2.resource import JsonColumn, V2Resource, make_links_column, make_plain_column, make_time_column
from accelerators.api.v2.views import V2DetailView, V2ListView, V2View
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import BIND_ENDED_STATES
from accelerators.requests import binding
from accelerators.requests.binding_sql import VISIBLE_CONDITION

NEEDS_SERVICE_TOKEN = "This operation requires a service token. Use the Compute API to manage instance accelerators."
MAX_DELETED_REQUESTS = 1000


def _make_bound_only_column(name: str, sql: str, otherwise: str) -> JsonColumn:
    """Return a column that has the value of `sql` for a Bound request, and `otherwise` for any other."""
    return JsonColumn(name, f"CASE q.state WHEN 'Bound' THEN {sql} ELSE {otherwise} END", None)


REQUESTS = V2Resource(
    name="arqs",
    noun="ExtArq",
    alias="q",
    tables="""accelerators_acceleratorrequest q JOIN accelerators_deviceprofile f ON f.id = q.profile_id
        LEFT JOIN accelerators_attachhandle t ON t.id = q.attach_handle_id""",
    visible_condition=VISIBLE_CONDITION,
    columns=(
        make_plain_column("uuid", "q.uuid"),
        make_plain_column("state", "q.state"),
        make_plain_column("device_profile_name", "f.name"),
        make_plain_column("device_profile_group_id", "q.group_id"),
        make_plain_column("hostname", "q.hostname"),
        make_plain_column("device_rp_uuid", "q.device_rp_uuid"),
        make_plain_column("instance_uuid", "q.instance_uuid"),
        make_plain_column("project_id", "q.project_id"),
        _make_bound_only_column("attach_handle_type", "t.attach_type", "''"),
        _make_bound_only_column("attach_handle_uuid", "t.uuid", "NULL"),
        _make_bound_only_column("attach_handle_info", "t.attach_info::json", "'{}'::json"),
        make_links_column("q.uuid", self="/accelerator/v2/accelerator_requests/"),
        make_time_column("created_at", "q.created_at"),
        make_time_column("updated_at", "q.updated_at"),
    ),
)


class RequestMethods(V2View):
    """POST, PATCH and DELETE, which the collection and its members share. POST and PATCH ignore a uuid in the path."""

    resource = REQUESTS
    allow_header = "DELETE, GET, PATCH, POST"
    not_found_methods: ClassVar[Collection[str]] = ()
    policy_rules = {
        "GET": "cyborg:arq:get_all",
        "POST": "cyborg:arq:create",
        "PATCH": "cyborg:arq:update",
        "DELETE": "cyborg:arq:delete",
    }

    def build_visible_params(self) -> dict[str, Any]:
        """Return the SQL parameter `project` of VISIBLE_CONDITION: only requests of that project are visible.

        It is the caller's project; for administrators it is None, which makes the requests of all projects visible.
        """
        return {"project": None if self.caller.is_admin else self.caller.project_id}

    def post(self, request: Request, uuid: str = "") -> Response:
        """Create the requests of the device profile named `device_profile_name`; 201 with the list of them.

        400 for an invalid body, 404 if there is no such profile.
        """
        arguments.parse_known_arguments(request.query_params.lists())
        body = bodies.read_json_body(request, "req")
        bodies.check_condition(isinstance(body, dict), "The body must be an object with a device_profile_name.")
        name = body.get("device_profile_name")
        bodies.check_condition(isinstance(name, str), "DeviceProfile name needed.")
        if len(name) > bodies.MAX_TEXT_CHARS or "\0" in name:
            raise V2Error(404, f"Device Profile not found with name={name[: bodies.MAX_TEXT_CHARS]}")
        made = binding.create_requests(name, self.caller)
        query = arguments.ListQuery()
        found = REQUESTS.fetch_list(
            query,
            self.version,
            self.base_url,
            "q.uuid = ANY(%(made)s::uuid[])",
            made=made,
            **self.build_visible_params(),
        )
        return Response(found, 201)

    def patch(self, request: Request, uuid: str = "") -> Response:
        """Bind or unbind all requests in the body; 202 when all handles are reserved or released.

        Needs a service token (403). The errors are those of `patches.parse_patch`, `binding.bind_requests` and
        `binding.unbind_requests`; with an error nothing is bound or unbound.
        """
        arguments.parse_known_arguments(request.query_params.lists())
        caller = self.caller
        patch = patches.parse_patch(bodies.read_json_body(request, "patch_list"), self.version, caller.is_admin)
        if not caller.service:
            raise V2Error(403, NEEDS_SERVICE_TOKEN)
        _check_canonical_uuids(patch.uuids)
        if patch.binds:
            binding.bind_requests(patch.binds, caller)
        else:
            binding.unbind_requests(patch.uuids, caller)
        return Response(None, 202)

    def delete(self, request: Request, uuid: str = "") -> Response:
        """Delete requests; 204. They are given as a comma-separated list of uuids in the path or in `arqs`, or as all
        requests of an `instance`.

        403 without a service token if an instance is given, or if one of the requests belongs to an instance. 404 if
        one of the uuids is not a request that the caller may see. With an error nothing is deleted.
        """
        given = arguments.parse_known_arguments(request.query_params.lists(), "arqs", "instance")
        uuid_list, instance = uuid or given.get("arqs"), given.get("instance")
        if bool(uuid_list) == (instance is not None) or (uuid and "arqs" in given):
            message = "Object action delete failed because: Provide either an ARQ uuid list or an instance UUID"
            raise V2Error(400, message)
        if instance is not None:
            arguments.check_uuid(instance, "instance")
            if not self.caller.service:
                raise V2Error(403, NEEDS_SERVICE_TOKEN)
            if arguments.is_canonical_uuid(instance):
                binding.delete_requests_of_instance(instance, self.caller)
        elif uuid_list:
            uuids = list(dict.fromkeys(uuid_list.split(",")))
            bodies.check_condition(
                len(uuids) <= MAX_DELETED_REQUESTS, f"At most {MAX_DELETED_REQUESTS} requests are deleted at once."
            )
            _check_canonical_uuids(uuids)
            binding.delete_requests(uuids, self.caller)
        return Response(None, 204)


class RequestList(RequestMethods, V2ListView):
    """`GET /v2/accelerator_requests?instance=&bind_state=`."""

    def get(self, request: Request) -> Response:
        """Return the requests that the caller may see. With `bind_state=resolved` and an instance, answer 423 if one of
        its requests is not resolved (Bound or BindFailed); without an instance, return only resolved requests.

        400 for an instance that is not a uuid, and for any other `bind_state`.
        """
        query, given = arguments.parse_page_query(request.query_params.lists(), ("instance", "bind_state"))
        bind_state, instance = given.get("bind_state"), given.get("instance")
        if bind_state not in (None, "", "resolved"):
            raise V2Error(400, f"Bad state: {bind_state} for ARQ: None. Expected state(s): ['resolved']")
        condition = "TRUE"
        if instance is not None:
            arguments.check_uuid(instance, "instance")
            condition = "q.instance_uuid = %(instance)s::uuid" if arguments.is_canonical_uuid(instance) else "FALSE"
        if bind_state and instance is not None:
            if REQUESTS.has_element(f"{condition} AND q.state <> ALL(%(resolved)s)", **self._build_params(instance)):
                return Response({"error_message": "null"}, 423)
        elif bind_state:
            condition = "q.state = ANY(%(resolved)s)"
        return Response(
            REQUESTS.fetch_list(query, self.version, self.base_url, condition, **self._build_params(instance))
        )

    def _build_params(self, instance: str | None) -> dict[str, Any]:
        """Return the SQL parameters of the list's conditions: the visible project, the instance and the resolved
        states."""
        return self.build_visible_params() | {"instance": instance, "resolved": list(BIND_ENDED_STATES)}


class RequestDetail(RequestMethods, V2DetailView):
    """`GET /v2/accelerator_requests/{uuid}`: not wrapped. Another project's request is answered with 404."""

    policy_rules = RequestMethods.policy_rules | {"GET": "cyborg:arq:get_one"}


def _check_canonical_uuids(uuids: list[str]) -> None:
    """Raise RefusedError NOT_FOUND (404) for the first text that is not a uuid in the stored form."""
    for uuid in uuids:
        if not arguments.is_canonical_uuid(uuid):
            raise RefusedError(RefusalReason.NOT_FOUND, f"ExtArq not found with uuid={uuid}")
