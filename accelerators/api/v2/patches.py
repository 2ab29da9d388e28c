"""Parse the body of `PATCH /v2/accelerator_requests`, which maps requests to operations (contract section 2.3).
Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from accelerators.api.v2 import arguments, bodies
from accelerators.api.v2.faults import V2Error, bad_input
from accelerators.api.v2.versions import Version, below
from accelerators.requests.binding import Bind

NEEDED = ("hostname", "device_rp_uuid", "instance_uuid")
PROJECT = "project_id"
MAX_PATCHED = 1000

_PROJECT = re.compile(r"[A-Za-z0-9_.-]{1,255}")


@dataclass(frozen=True)
class Patch:
    """The parsed body. If `binds` is empty, all of `uuids` are to be unbound; otherwise `binds` has one entry per
    request."""

    uuids: list[str]
    binds: list[Bind]


def read(body: object, version: Version, is_admin: bool) -> Patch:
    """Parse the body and check all its operations, in the body's order. Changes nothing; raises V2Error."""
    bodies.shape(isinstance(body, dict) and bool(body), "The body must map request uuids to lists of operations.")
    assert isinstance(body, dict)
    bodies.shape(len(body) <= MAX_PATCHED, f"At most {MAX_PATCHED} requests are patched at once.")
    kinds, binds = set(), []
    for uuid, operations in body.items():
        kind, fields = _one(operations, version, is_admin)
        kinds.add(kind)
        if kind == "add":
            binds.append(_bind(uuid, fields))
    if len(kinds) > 1:
        raise _cannot("Every op must be add or remove")
    return Patch(list(body), binds)


def _one(operations: object, version: Version, is_admin: bool) -> tuple[str, dict[str, Any]]:
    sentence = "The operations of a request must be a list of objects with op and path."
    bodies.shape(isinstance(operations, list) and bool(operations), sentence)
    assert isinstance(operations, list)
    for operation in operations:
        bodies.shape(isinstance(operation, dict) and {"op", "path"} <= operation.keys(), sentence)
        bodies.shape(isinstance(operation["path"], str), sentence)
    ops = {str(operation["op"]) for operation in operations}
    if ops not in ({"add"}, {"remove"}):
        raise _cannot("Every op must be add or remove")
    fields = {operation["path"].lstrip("/"): operation.get("value") for operation in operations}
    for operation in operations:
        _check_path(operation["path"], version, is_admin)
    return ops.pop(), fields


def _check_path(path: str, version: Version, is_admin: bool) -> None:
    name = path.lstrip("/")
    if name == PROJECT:
        if version < (2, 1):
            raise below((2, 1))
        if not is_admin:
            raise V2Error(403, "Access was denied to the following resource: cyborg:arq:update")
    elif name not in NEEDED:
        raise _cannot(f"Invalid path in patch {path[:64]}")


def _bind(uuid: str, fields: dict[str, Any]) -> Bind:
    if absent := [name for name in NEEDED if fields.get(name) is None]:
        raise _cannot(f"Fields absent in patch {', '.join(absent)}")
    project = fields.get(PROJECT)
    if project is not None and not (isinstance(project, str) and _PROJECT.fullmatch(project)):
        raise bad_input(PROJECT, str(project)[:64], "It must be the id of a project.")
    host = bodies.text(fields["hostname"], "hostname")
    return Bind(uuid, host, _uuid(fields, "device_rp_uuid"), _uuid(fields, "instance_uuid"), project or "")


def _uuid(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    found = arguments.canonical(value) if isinstance(value, str) else None
    if found is None:
        raise bad_input(name, str(value)[:64], f"Expected a uuid but received {str(value)[:64]}.")
    return found


def _cannot(reason: str) -> V2Error:
    return V2Error(400, f"Couldn't apply patch. Reason: {reason}")
