"""`/v2/device_profiles` (contract section 2.2). A single profile is wrapped and formats its timestamps differently;
create takes a list with one profile."""

from __future__ import annotations

from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments, bodies
from accelerators.api.v2.faults import V2Error, missing_argument
from accelerators.api.v2.resource import Column, Resource, links, moment, plain
from accelerators.api.v2.versions import below
from accelerators.api.v2.views import ListView, View
from accelerators.domain import groups
from accelerators.models import DeviceProfile
from accelerators.requests import profiles

_LINKS = links("p.uuid", self="/accelerator/v2/device_profiles/")
_TABLES = {"noun": "Device Profile", "alias": "p", "tables": "accelerators_deviceprofile p", "shown": "TRUE"}

PROFILES = Resource(
    name="device_profiles",
    columns=(
        plain("uuid", "p.uuid"),
        plain("name", "p.name"),
        plain("description", "p.description"),
        Column("groups", "p.groups", None),
        moment("created_at", "p.created_at"),
        moment("updated_at", "p.updated_at"),
        _LINKS,
    ),
    **_TABLES,
)


def _printed(name: str, sql: str) -> Column:
    """Return a column with a timestamp as Python prints it, or the text 'None'. Upstream shows a single profile this
    way."""
    return Column(name, f"coalesce(to_char({sql} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS\"+00:00\"'), 'None')", None)


ONE_PROFILE = Resource(
    name="device_profile",
    columns=(
        plain("name", "p.name"),
        plain("description", "p.description"),
        plain("uuid", "p.uuid"),
        Column("groups", "p.groups", None),
        _printed("created_at", "p.created_at"),
        _printed("updated_at", "p.updated_at"),
        _LINKS,
    ),
    **_TABLES,
)


class Profiles(View):
    """The methods that the collection and its members share."""

    allow = "DELETE, GET, POST"
    policy_rules = {
        "GET": "cyborg:device_profile:get_all",
        "POST": "cyborg:device_profile:create",
        "DELETE": "cyborg:device_profile:delete",
    }

    def post(self, request: Request, value: str = "") -> Response:
        """Create the one profile in the list; 201 with the object, not wrapped."""
        arguments.only(request.query_params.lists())
        body = bodies.read(request, "req_devprof_list")
        if not isinstance(body, list) or len(body) != 1:
            raise V2Error(400, "Only one device profile allowed per POST request for now.")
        uuid = _create(body[0], request)
        return Response(PROFILES.find(str(uuid), self.version, self.base), 201)


class ProfileList(Profiles, ListView):
    """`GET /v2/device_profiles?name=`, `POST`, `DELETE ?value=`."""

    resource = PROFILES

    def get(self, request: Request) -> Response:
        """Return all profiles, or those whose names are in the comma-separated list `name`."""
        query, given = arguments.page(request.query_params.lists(), ("name",))
        if "name" not in given:
            return Response(PROFILES.list(query, self.version, self.base))
        names = given["name"].split(",")
        return Response(PROFILES.list(query, self.version, self.base, "p.name = ANY(%(names)s)", names=names))

    def delete(self, request: Request) -> Response:
        """Delete the profiles in `?value=`: one uuid, or a comma-separated list of names; 204."""
        given = arguments.only(request.query_params.lists(), "value")
        if "value" not in given:
            raise missing_argument("value")
        return _delete(given["value"], request)


class ProfileDetail(Profiles):
    """`GET` and `DELETE /v2/device_profiles/{uuid or name}`. A POST ignores the last part of the path."""

    policy_rules = Profiles.policy_rules | {"GET": "cyborg:device_profile:get_one"}

    def get(self, request: Request, value: str) -> Response:
        """Return one profile, wrapped. A name is accepted since 2.2."""
        arguments.only(request.query_params.lists())
        by = "uuid" if arguments.canonical(value) else "name"
        if by == "name" and self.version < (2, 2):
            raise below((2, 2))
        there = "\0" not in value if by == "name" else arguments.stored(value)
        found = ONE_PROFILE.find(value, self.version, self.base, by) if there else None
        if found is None:
            raise _unknown(by, value)
        return Response(b'{"device_profile":%s}' % found)

    def delete(self, request: Request, value: str) -> Response:
        """Delete the profile with this uuid, or those in a comma-separated list of names; 204."""
        arguments.only(request.query_params.lists())
        return _delete(value, request)


def _create(asked: object, request: Request) -> UUID:
    if not isinstance(asked, dict):
        raise V2Error(400, "A device profile must be an object with a name and groups.")
    name = asked.get("name")
    bodies.shape(isinstance(name, str), "DeviceProfile name needed.")
    if not name or len(name) > bodies.LONGEST:
        # Upstream's tests ask for a 500 here (contract annex A.4).
        sentence = f"The name of a device profile has at most {bodies.LONGEST} characters." if name else ""
        raise V2Error(500, sentence or "DeviceProfile name needed.")
    bodies.shape(bool(asked.get("groups")), "DeviceProfile needs groups field.")
    try:
        groups.check_name(name)
        checked = groups.check_groups(asked["groups"])
    except groups.GroupError as error:
        raise V2Error(400, str(error)) from None
    description = asked.get("description")
    if description is not None:
        description = bodies.text(str(description), "description", profiles.MAX_DESCRIPTION, 0)
    return profiles.create(name, checked, description, _chosen(asked.get("uuid")), request.user)


def _chosen(uuid: object) -> UUID | None:
    """Parse the uuid that the caller chose for the new profile, in any valid form; None if there is none. Raise 400
    otherwise."""
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not (found := arguments.canonical(uuid)):
        raise V2Error(400, f"Expected a uuid but received {str(uuid)[:64]}.")
    return UUID(found)


def _delete(value: str, request: Request) -> Response:
    """Delete one profile by uuid, or several by name.

    The first name that does not exist raises 404; profiles named before it have been deleted by then.
    """
    if arguments.canonical(value):
        if not arguments.stored(value):
            raise _unknown("uuid", value)
        profiles.delete(UUID(value), request.user)
        return Response(None, 204)
    names = value.split(",")
    readable = [name for name in names if "\0" not in name]
    found = dict(DeviceProfile.objects.filter(name__in=readable).values_list("name", "uuid"))
    for name in names:
        if name not in found:
            raise _unknown("name", name)
        profiles.delete(found.pop(name), request.user)
    return Response(None, 204)


def _unknown(by: str, value: str) -> V2Error:
    return V2Error(404, f"Device Profile not found with {by}={value}")
