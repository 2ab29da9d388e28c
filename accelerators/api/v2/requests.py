"""`/v2/accelerator_requests` (contract section 2.3): Nova creates, binds, reads and deletes accelerator requests
here."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments, bodies, patches
from accelerators.api.v2.faults import V2Error
from accelerators.api.v2.resource import Column, Resource, links, moment, plain
from accelerators.api.v2.views import DetailView, ListView, View
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import RESOLVED
from accelerators.requests import binding
from accelerators.requests.binding_sql import VISIBLE

NEEDS_SERVICE = "This operation requires a service token. Use the Compute API to manage instance accelerators."
MAX_DELETED = 1000


def _held(name: str, sql: str, otherwise: str) -> Column:
    """Return a column that has the value of `sql` for a Bound request, and `otherwise` for any other."""
    return Column(name, f"CASE q.state WHEN 'Bound' THEN {sql} ELSE {otherwise} END", None)


REQUESTS = Resource(
    name="arqs",
    noun="ExtArq",
    alias="q",
    tables="""accelerators_acceleratorrequest q JOIN accelerators_deviceprofile f ON f.id = q.profile_id
        LEFT JOIN accelerators_attachhandle t ON t.id = q.attach_handle_id""",
    shown=VISIBLE,
    columns=(
        plain("uuid", "q.uuid"),
        plain("state", "q.state"),
        plain("device_profile_name", "f.name"),
        plain("device_profile_group_id", "q.group_id"),
        plain("hostname", "q.hostname"),
        plain("device_rp_uuid", "q.device_rp_uuid"),
        plain("instance_uuid", "q.instance_uuid"),
        plain("project_id", "q.project_id"),
        _held("attach_handle_type", "t.attach_type", "''"),
        _held("attach_handle_uuid", "t.uuid", "NULL"),
        _held("attach_handle_info", "t.attach_info::json", "'{}'::json"),
        links("q.uuid", self="/accelerator/v2/accelerator_requests/"),
        moment("created_at", "q.created_at"),
        moment("updated_at", "q.updated_at"),
    ),
)


class Requests(View):
    """The methods that the collection and its members share. POST and PATCH ignore a uuid in the path."""

    resource = REQUESTS
    allow = "DELETE, GET, PATCH, POST"
    unrouted = ()
    policy_rules = {
        "GET": "cyborg:arq:get_all",
        "POST": "cyborg:arq:create",
        "PATCH": "cyborg:arq:update",
        "DELETE": "cyborg:arq:delete",
    }

    @property
    def scope(self) -> dict[str, object]:
        """Return the project whose requests are visible; None means all projects (administrators)."""
        caller = self.request.user
        return {"project": None if caller.is_admin else caller.project_id}

    def post(self, request: Request, uuid: str = "") -> Response:
        """Create the requests of the device profile named `device_profile_name`; 201."""
        arguments.only(request.query_params.lists())
        body = bodies.read(request, "req")
        bodies.shape(isinstance(body, dict), "The body must be an object with a device_profile_name.")
        name = body.get("device_profile_name")
        bodies.shape(isinstance(name, str), "DeviceProfile name needed.")
        if len(name) > bodies.LONGEST or "\0" in name:
            raise V2Error(404, f"Device Profile not found with name={name[: bodies.LONGEST]}")
        made = binding.create(name, request.user)
        query = arguments.ListQuery()
        found = REQUESTS.list(query, self.version, self.base, "q.uuid = ANY(%(made)s::uuid[])", made=made, **self.scope)
        return Response(found, 201)

    def patch(self, request: Request, uuid: str = "") -> Response:
        """Bind or unbind all requests in the body; 202 when all handles are reserved or released. Needs a service
        token."""
        arguments.only(request.query_params.lists())
        caller = request.user
        patch = patches.read(bodies.read(request, "patch_list"), self.version, caller.is_admin)
        if not caller.service:
            raise V2Error(403, NEEDS_SERVICE)
        _check_stored(patch.uuids)
        if patch.binds:
            binding.bind(patch.binds, caller)
        else:
            binding.unbind(patch.uuids, caller)
        return Response(None, 202)

    def delete(self, request: Request, uuid: str = "") -> Response:
        """Delete requests; 204. They are given as a comma-separated list of uuids in the path or in `arqs`, or as all
        requests of an `instance`. Deleting by instance needs a service token."""
        given = arguments.only(request.query_params.lists(), "arqs", "instance")
        named, instance = uuid or given.get("arqs"), given.get("instance")
        if bool(named) == (instance is not None) or (uuid and "arqs" in given):
            sentence = "Object action delete failed because: Provide either an ARQ uuid list or an instance UUID"
            raise V2Error(400, sentence)
        if instance is not None:
            arguments.check_uuid(instance)
            if not request.user.service:
                raise V2Error(403, NEEDS_SERVICE)
            if arguments.stored(instance):
                binding.delete_of_instance(instance, request.user)
        elif named:
            uuids = list(dict.fromkeys(named.split(",")))
            bodies.shape(len(uuids) <= MAX_DELETED, f"At most {MAX_DELETED} requests are deleted at once.")
            _check_stored(uuids)
            binding.delete(uuids, request.user)
        return Response(None, 204)


class RequestList(Requests, ListView):
    """`GET /v2/accelerator_requests?instance=&bind_state=`."""

    def get(self, request: Request) -> Response:
        """Return the caller's requests. With `bind_state=resolved` and an instance, answer 423 if one of its requests
        is not resolved; without an instance, return only resolved requests."""
        query, given = arguments.page(request.query_params.lists(), ("instance", "bind_state"))
        bind_state, instance = given.get("bind_state"), given.get("instance")
        if bind_state not in (None, "", "resolved"):
            raise V2Error(400, f"Bad state: {bind_state} for ARQ: None. Expected state(s): ['resolved']")
        also = "TRUE"
        if instance is not None:
            arguments.check_uuid(instance)
            also = "q.instance_uuid = %(instance)s::uuid" if arguments.stored(instance) else "FALSE"
        if bind_state and instance is not None:
            if REQUESTS.exists(f"{also} AND q.state <> ALL(%(resolved)s)", **self._values(instance)):
                return Response({"error_message": "null"}, 423)
        elif bind_state:
            also = "q.state = ANY(%(resolved)s)"
        return Response(REQUESTS.list(query, self.version, self.base, also, **self._values(instance)))

    def _values(self, instance: str | None) -> dict[str, object]:
        return self.scope | {"instance": instance, "resolved": list(RESOLVED)}


class RequestDetail(Requests, DetailView):
    """`GET /v2/accelerator_requests/{uuid}`: not wrapped. Another project's request is answered with 404."""

    policy_rules = Requests.policy_rules | {"GET": "cyborg:arq:get_one"}


def _check_stored(uuids: list[str]) -> None:
    """Raise RefusedError UNKNOWN (404) for the first text that is not a uuid in the stored form."""
    for uuid in uuids:
        if not arguments.stored(uuid):
            raise RefusedError(Reason.UNKNOWN, f"ExtArq not found with uuid={uuid}")
