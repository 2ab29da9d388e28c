"""`/v2/device_profiles` (contract section 2.2). A single profile is wrapped and formats its timestamps differently;
create takes a list with one profile."""

from __future__ import annotations

from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments, bodies
from accelerators.api.v2.faults import V2Error, missing_argument_error
from accelerators.api.v2.resource import JsonColumn, V2Resource, make_links_column, make_plain_column, make_time_column
from accelerators.api.v2.versions import version_too_low_error
from accelerators.api.v2.views import V2ListView, V2View
from accelerators.domain import groups
from accelerators.domain.caller import Caller
from accelerators.models import DeviceProfile
from accelerators.requests import profiles

_LINKS_COLUMN = make_links_column("p.uuid", self="/accelerator/v2/device_profiles/")
_TABLE_OPTIONS = {
    "noun": "Device Profile",
    "alias": "p",
    "tables": "accelerators_deviceprofile p",
    "visible_condition": "TRUE",
}

PROFILES = V2Resource(
    name="device_profiles",
    columns=(
        make_plain_column("uuid", "p.uuid"),
        make_plain_column("name", "p.name"),
        make_plain_column("description", "p.description"),
        JsonColumn("groups", "p.groups", None),
        make_time_column("created_at", "p.created_at"),
        make_time_column("updated_at", "p.updated_at"),
        _LINKS_COLUMN,
    ),
    **_TABLE_OPTIONS,
)


def _make_printed_time_column(name: str, sql: str) -> JsonColumn:
    """Return a column with a timestamp in UTC as Python prints it, to the second, or the text 'None'.

    Upstream shows a single profile this way.
    """
    return JsonColumn(
        name, f"coalesce(to_char({sql} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS\"+00:00\"'), 'None')", None
    )


ONE_PROFILE = V2Resource(
    name="device_profile",
    columns=(
        make_plain_column("name", "p.name"),
        make_plain_column("description", "p.description"),
        make_plain_column("uuid", "p.uuid"),
        JsonColumn("groups", "p.groups", None),
        _make_printed_time_column("created_at", "p.created_at"),
        _make_printed_time_column("updated_at", "p.updated_at"),
        _LINKS_COLUMN,
    ),
    **_TABLE_OPTIONS,
)


class ProfileMethods(V2View):
    """POST, which the collection and its members share. It ignores the last part of a member's path."""

    allow_header = "DELETE, GET, POST"
    policy_rules = {
        "GET": "cyborg:device_profile:get_all",
        "POST": "cyborg:device_profile:create",
        "DELETE": "cyborg:device_profile:delete",
    }

    def post(self, request: Request, value: str = "") -> Response:
        """Create the one profile in the list; 201 with the object, not wrapped.

        400 for an invalid body and 409 for a name that is in use. As upstream, 500 for an empty or too long name and
        for a uuid that is in use.
        """
        arguments.parse_known_arguments(request.query_params.lists())
        body = bodies.read_json_body(request, "req_devprof_list")
        if not isinstance(body, list) or len(body) != 1:
            raise V2Error(400, "Only one device profile allowed per POST request for now.")
        uuid = _create_profile(body[0], self.caller)
        return Response(PROFILES.fetch_one(str(uuid), self.version, self.base_url), 201)


class ProfileList(ProfileMethods, V2ListView):
    """`GET /v2/device_profiles?name=`, `POST`, `DELETE ?value=`."""

    resource = PROFILES

    def get(self, request: Request) -> Response:
        """Return all profiles, or those whose names are in the comma-separated list `name`.

        A name that no profile has is ignored. 400 for an invalid query.
        """
        query, given = arguments.parse_page_query(request.query_params.lists(), ("name",))
        if "name" not in given:
            return Response(PROFILES.fetch_list(query, self.version, self.base_url))
        names = given["name"].split(",")
        return Response(PROFILES.fetch_list(query, self.version, self.base_url, "p.name = ANY(%(names)s)", names=names))

    def delete(self, request: Request) -> Response:
        """Delete the profiles in `?value=`: one uuid, or a comma-separated list of names; 204.

        400 without `value`, 404 for a profile that does not exist, 409 for a profile that requests use.
        """
        given = arguments.parse_known_arguments(request.query_params.lists(), "value")
        if "value" not in given:
            raise missing_argument_error("value")
        return _delete_profiles(given["value"], self.caller)


class ProfileDetail(ProfileMethods):
    """`GET` and `DELETE /v2/device_profiles/{uuid or name}`."""

    policy_rules = ProfileMethods.policy_rules | {"GET": "cyborg:device_profile:get_one"}

    def get(self, request: Request, value: str) -> Response:
        """Return one profile, wrapped; 404 if it does not exist. A name is accepted since version 2.2 (406 before)."""
        arguments.parse_known_arguments(request.query_params.lists())
        column = "uuid" if arguments.to_canonical_uuid(value) else "name"
        if column == "name" and self.version < (2, 2):
            raise version_too_low_error((2, 2))
        can_exist = "\0" not in value if column == "name" else arguments.is_canonical_uuid(value)
        profile = ONE_PROFILE.fetch_one(value, self.version, self.base_url, column) if can_exist else None
        if profile is None:
            raise _unknown_profile_error(column, value)
        return Response(b'{"device_profile":%s}' % profile)

    def delete(self, request: Request, value: str) -> Response:
        """Delete the profile with this uuid, or those in a comma-separated list of names; 204.

        404 for a profile that does not exist, 409 for a profile that requests use.
        """
        arguments.parse_known_arguments(request.query_params.lists())
        return _delete_profiles(value, self.caller)


def _create_profile(body: object, caller: Caller) -> UUID:
    """Check the body of one profile, store the profile and return its uuid.

    Raises V2Error: 500 for a name that is empty or too long, 400 for everything else that is invalid. Raises
    RefusedError: CONFLICT if the name is in use, DUPLICATE if the uuid is in use.
    """
    if not isinstance(body, dict):
        raise V2Error(400, "A device profile must be an object with a name and groups.")
    name = body.get("name")
    bodies.check_condition(isinstance(name, str), "DeviceProfile name needed.")
    if not name or len(name) > bodies.MAX_TEXT_CHARS:
        # Upstream's tests ask for a 500 here (contract annex A.4).
        message = f"The name of a device profile has at most {bodies.MAX_TEXT_CHARS} characters." if name else ""
        raise V2Error(500, message or "DeviceProfile name needed.")
    bodies.check_condition(bool(body.get("groups")), "DeviceProfile needs groups field.")
    try:
        groups.check_profile_name(name)
        checked_groups = groups.check_groups(body["groups"])
    except groups.GroupError as error:
        raise V2Error(400, str(error)) from None
    description = body.get("description")
    if description is not None:
        description = bodies.check_text(str(description), "description", profiles.MAX_DESCRIPTION, 0)
    return profiles.create_profile(name, checked_groups, description, _parse_requested_uuid(body.get("uuid")), caller)


def _parse_requested_uuid(uuid: object) -> UUID | None:
    """Parse the uuid that the caller chose for the new profile, in any valid form; None if there is none.

    Raises V2Error 400 for anything else.
    """
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not (canonical := arguments.to_canonical_uuid(uuid)):
        raise V2Error(400, f"Expected a uuid but received {str(uuid)[:64]}.")
    return UUID(canonical)


def _delete_profiles(value: str, caller: Caller) -> Response:
    """Delete one profile by uuid, or several by name (comma-separated); return 204.

    The first name that does not exist raises 404, and the first profile that requests use raises RefusedError IN_USE
    (409); profiles named before it have been deleted by then.
    """
    if arguments.to_canonical_uuid(value):
        if not arguments.is_canonical_uuid(value):
            raise _unknown_profile_error("uuid", value)
        profiles.delete_profile(UUID(value), caller)
        return Response(None, 204)
    names = value.split(",")
    storable_names = [name for name in names if "\0" not in name]
    uuid_by_name = dict(DeviceProfile.objects.filter(name__in=storable_names).values_list("name", "uuid"))
    for name in names:
        if name not in uuid_by_name:
            raise _unknown_profile_error("name", name)
        profiles.delete_profile(uuid_by_name.pop(name), caller)
    return Response(None, 204)


def _unknown_profile_error(column: str, value: str) -> V2Error:
    """Return the error 404 for a profile that does not exist; `column` is `uuid` or `name`."""
    return V2Error(404, f"Device Profile not found with {column}={value}")
