"""Parse the body of `PATCH /v2/accelerator_requests`, which maps requests to operations (contract section 2.3).
This module is pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from accelerators.api.v2 import arguments, bodies
from accelerators.api.v2.faults import V2Error, bad_input_error
from accelerators.api.v2.versions import Microversion, version_too_low_error
from accelerators.requests.binding import BindSpec

REQUIRED_FIELDS = ("hostname", "device_rp_uuid", "instance_uuid")
PROJECT_FIELD = "project_id"
MAX_PATCHED_REQUESTS = 1000

_PROJECT_ID = re.compile(r"[A-Za-z0-9_.-]{1,255}")


@dataclass(frozen=True)
class RequestsPatch:
    """The parsed body. `uuids` are its keys, which are not checked to be uuids.

    If `binds` is empty, all of `uuids` are to be unbound; otherwise `binds` has one entry per request.
    """

    uuids: list[str]
    binds: list[BindSpec]


def parse_patch(body: object, version: Microversion, is_admin: bool) -> RequestsPatch:
    """Parse the body and check all its operations, in the body's order. Changes nothing.

    Raises V2Error: 400 for an invalid body; for the field `project_id` 406 below version 2.1, and 403 unless
    `is_admin`.
    """
    bodies.check_condition(
        isinstance(body, dict) and bool(body), "The body must map request uuids to lists of operations."
    )
    assert isinstance(body, dict)
    bodies.check_condition(
        len(body) <= MAX_PATCHED_REQUESTS, f"At most {MAX_PATCHED_REQUESTS} requests are patched at once."
    )
    kinds, binds = set(), []
    for uuid, operations in body.items():
        kind, fields = _parse_operations(operations, version, is_admin)
        kinds.add(kind)
        if kind == "add":
            binds.append(_parse_bind(uuid, fields))
    if len(kinds) > 1:
        raise _patch_error("Every op must be add or remove")
    return RequestsPatch(list(body), binds)


def _parse_operations(operations: object, version: Microversion, is_admin: bool) -> tuple[str, dict[str, Any]]:
    """Check the operations of one request; return their common `op` (add or remove), and their values by path.

    A path is returned without the slash before it. Raises V2Error if an operation is invalid, or if they have different
    `op`s.
    """
    message = "The operations of a request must be a list of objects with op and path."
    bodies.check_condition(isinstance(operations, list) and bool(operations), message)
    assert isinstance(operations, list)
    for operation in operations:
        bodies.check_condition(isinstance(operation, dict) and {"op", "path"} <= operation.keys(), message)
        bodies.check_condition(isinstance(operation["path"], str), message)
    ops = {str(operation["op"]) for operation in operations}
    if ops not in ({"add"}, {"remove"}):
        raise _patch_error("Every op must be add or remove")
    fields = {operation["path"].lstrip("/"): operation.get("value") for operation in operations}
    for operation in operations:
        _check_path(operation["path"], version, is_admin)
    return ops.pop(), fields


def _check_path(path: str, version: Microversion, is_admin: bool) -> None:
    """Raise V2Error unless an operation may name this path: 400 if it is unknown.

    For `project_id` raises 406 below version 2.1, and 403 unless `is_admin`.
    """
    name = path.lstrip("/")
    if name == PROJECT_FIELD:
        if version < (2, 1):
            raise version_too_low_error((2, 1))
        if not is_admin:
            raise V2Error(403, "Access was denied to the following resource: cyborg:arq:update")
    elif name not in REQUIRED_FIELDS:
        raise _patch_error(f"Invalid path in patch {path[:64]}")


def _parse_bind(uuid: str, fields: dict[str, Any]) -> BindSpec:
    """Build the BindSpec of one request from its fields; raise V2Error 400 if one is missing or invalid.

    `project_id` may be missing. `uuid` is not checked.
    """
    if missing := [name for name in REQUIRED_FIELDS if fields.get(name) is None]:
        raise _patch_error(f"Fields absent in patch {', '.join(missing)}")
    project = fields.get(PROJECT_FIELD)
    if project is not None and not (isinstance(project, str) and _PROJECT_ID.fullmatch(project)):
        raise bad_input_error(PROJECT_FIELD, str(project)[:64], "It must be the id of a project.")
    host = bodies.check_text(fields["hostname"], "hostname")
    return BindSpec(uuid, host, _get_uuid(fields, "device_rp_uuid"), _get_uuid(fields, "instance_uuid"), project or "")


def _get_uuid(fields: dict[str, Any], name: str) -> str:
    """Return the uuid in the field `name`, in its stored form; raise V2Error 400 if the value is not a uuid."""
    value = fields[name]
    canonical = arguments.to_canonical_uuid(value) if isinstance(value, str) else None
    if canonical is None:
        raise bad_input_error(name, str(value)[:64], f"Expected a uuid but received {str(value)[:64]}.")
    return canonical


def _patch_error(reason: str) -> V2Error:
    """Return the error 400 for a patch that cannot be applied, with the reason."""
    return V2Error(400, f"Couldn't apply patch. Reason: {reason}")
