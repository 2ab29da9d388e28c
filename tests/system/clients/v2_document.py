"""An OpenAPI document of the Accelerator API v2 for schemathesis. Upstream has none, and clients do not use this one.

It is written from the wire contract, sections 2.2 to 2.6: requests, answers and all allowed statuses.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

Schema = dict[str, Any]

UUID: Schema = {"type": "string", "format": "uuid"}
TEXT: Schema = {"type": "string"}
WHEN: Schema = {"type": "string", "format": "date-time"}
LINKS: Schema = {"type": "array", "items": {"type": "object", "required": ["href", "rel"]}}
NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]+$", "minLength": 1, "maxLength": 255}
ERROR: Schema = {
    "type": "object",
    "required": ["error_message"],
    "properties": {"error_message": TEXT},
    "additionalProperties": False,
}
GROUP: Schema = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": 3,
    "properties": {
        "resources:FPGA": {"type": "string", "pattern": "^[1-9]$"},
        "trait:CUSTOM_ONE": {"enum": ["required", "forbidden"]},
        "accel:function_id": UUID,
    },
    "additionalProperties": False,
}


def nullable(schema: Schema) -> Schema:
    """Return a schema that allows null, too."""
    return {"anyOf": [schema, {"type": "null"}]}


def resource(**properties: Schema) -> Schema:
    """Return the schema of an object that has exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TIMES = {"created_at": WHEN, "updated_at": nullable(WHEN)}
PROFILE = resource(
    uuid=UUID,
    name=NAME,
    description=nullable(TEXT),
    groups={"type": "array", "items": {"type": "object", "additionalProperties": TEXT}},
    links=LINKS,
    **TIMES,
)
SHOWN_PROFILE = resource(**PROFILE["properties"] | {"created_at": TEXT, "updated_at": TEXT})
"""A single profile has timestamps in another format: `2026-11-21 01:41:44+00:00` or the string `None` (2.2)."""
REQUEST = resource(
    uuid=UUID,
    state={"enum": ["Initial", "BindStarted", "Bound", "Unbound", "BindFailed"]},
    device_profile_name=NAME,
    device_profile_group_id={"type": "integer", "minimum": 0},
    hostname=nullable(TEXT),
    device_rp_uuid=nullable(UUID),
    instance_uuid=nullable(UUID),
    project_id=nullable(TEXT),
    attach_handle_type={"enum": ["", "PCI", "MDEV", "TEST_PCI", "DEV"]},
    attach_handle_uuid=nullable(UUID),
    attach_handle_info={"type": "object", "additionalProperties": TEXT},
    links=LINKS,
    **TIMES,
)
DEVICE = resource(
    uuid=UUID,
    type={"enum": ["GPU", "FPGA", "AICHIP", "QAT", "NIC", "SSD"]},
    vendor=TEXT,
    model=TEXT,
    std_board_info=nullable(TEXT),
    vendor_board_info=nullable(TEXT),
    hostname=TEXT,
    links=LINKS,
    **TIMES,
)
DEVICE["properties"] |= {"status": {"enum": ["enabled", "maintaining"]}}
DEPLOYABLE = resource(
    uuid=UUID,
    parent_id=nullable({"type": "integer"}),
    root_id=nullable({"type": "integer"}),
    name=TEXT,
    num_accelerators={"type": "integer", "minimum": 0},
    device_id={"type": "integer"},
    attributes_list=TEXT,
    rp_uuid=nullable(UUID),
    driver_name=nullable(TEXT),
    bitstream_id=nullable(UUID),
    links=LINKS,
    **TIMES,
)
ATTRIBUTE = resource(uuid=UUID, deployable_id={"type": "integer"}, key=TEXT, value=TEXT, links=LINKS, **TIMES)

NEW_PROFILE: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": 1,
    "items": {
        "type": "object",
        "required": ["name", "groups"],
        "properties": {
            "name": NAME,
            "description": nullable({"type": "string", "pattern": "^[^\\u0000]*$", "maxLength": 1000}),
            "groups": {"type": "array", "minItems": 1, "maxItems": 3, "items": GROUP},
        },
    },
}
NEW_REQUEST: Schema = {
    "type": "object",
    "required": ["device_profile_name"],
    "properties": {"device_profile_name": {"type": "string", "maxLength": 255}},
}
OPERATIONS: Schema = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "prefixItems": [
        resource(op={"const": "add"}, path={"const": "/hostname"}, value={"type": "string", "pattern": "^[a-z0-9.]+$"}),
        resource(op={"const": "add"}, path={"const": "/device_rp_uuid"}, value=UUID),
        resource(op={"const": "add"}, path={"const": "/instance_uuid"}, value=UUID),
    ],
}
NEW_PATCH: Schema = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": 3,
    "propertyNames": UUID,
    "additionalProperties": OPERATIONS,
}
NEW_ATTRIBUTE: Schema = {
    "type": "object",
    "required": ["deployable_id", "key", "value"],
    "properties": {
        "deployable_id": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "key": {"type": "string", "pattern": "^[^\\u0000]+$", "minLength": 1, "maxLength": 255},
        "value": {"type": "string", "pattern": "^[^\\u0000]*$", "maxLength": 65536},
    },
}
PROGRAM: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": 1,
    "items": resource(
        op={"enum": ["replace", "add"]},
        path={"const": "/program"},
        value={"type": "array", "minItems": 1, "maxItems": 1, "items": resource(image_uuid=UUID)},
    ),
}

VERSION: Schema = {
    "name": "OpenStack-API-Version",
    "in": "header",
    "schema": {"enum": [f"accelerator 2.{minor}" for minor in range(4)]},
}
PAGING = {"limit": {"type": "integer", "minimum": 0}, "marker": UUID}


def describe_operation(
    success: int, answer: Schema | None, /, *errors: int, body: Schema | None = None, **query: Schema
) -> Schema:
    """Describe an operation: its success status and answer, its body and its query parameters.

    `errors` are the error statuses that it can have besides those that all operations can have.
    """
    good: Schema = {"description": "Done."}
    if answer:
        good["content"] = {"application/json": {"schema": answer}}
    bad = {"description": "Refused.", "content": {"application/json": {"schema": ERROR}}}
    needed = success == HTTPStatus.NO_CONTENT  # a DELETE of a collection must say what to delete
    parameters = [{"name": n, "in": "query", "required": needed, "schema": schema} for n, schema in query.items()]
    made: Schema = {"parameters": [VERSION, *parameters], "responses": {str(success): good}}
    made["responses"] |= {str(status): bad for status in (400, 403, 404, 405, 406, *errors)}
    made["responses"]["401"] = {"description": "Who are you?", "content": {"application/json": {}}}
    if body:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        made["responses"] |= {"413": bad, "415": bad}
    return made


def describe_list_operation(key: str, item: Schema, /, **query: Schema) -> Schema:
    """Describe the GET of a collection, which answers with a list named `key`."""
    return describe_operation(200, resource(**{key: {"type": "array", "items": item}}), **PAGING, **query)


def _in_path(**schemas: Schema) -> Schema:
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": s} for name, s in schemas.items()]}


def document() -> Schema:
    """Return the whole document; all its paths are below /accelerator/v2."""
    profiles = describe_operation(201, PROFILE, 409, 500, body=NEW_PROFILE)
    requests = describe_operation(201, resource(arqs={"type": "array", "items": REQUEST}), body=NEW_REQUEST)
    patch = describe_operation(202, None, 409, 500, body=NEW_PATCH)
    attributes = describe_operation(201, ATTRIBUTE, body=NEW_ATTRIBUTE)
    action = describe_operation(204, None, 409)
    names: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]+(,[a-zA-Z0-9_-]+)?$"}
    uuids: Schema = {"type": "string", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"}
    paths: Schema = {
        "/device_profiles": {
            "get": describe_list_operation("device_profiles", PROFILE, name=TEXT),
            "post": profiles,
            "delete": describe_operation(204, None, 409, value=names),
        },
        "/device_profiles/{value}": _in_path(value=UUID)
        | {
            "get": describe_operation(200, resource(device_profile=SHOWN_PROFILE)),
            "post": profiles,
            "delete": describe_operation(204, None, 409),
        },
        "/accelerator_requests": {
            "get": describe_list_operation("arqs", REQUEST, instance=UUID, bind_state={"enum": ["resolved"]}),
            "post": requests,
            "patch": patch,
            "delete": describe_operation(204, None, arqs=uuids),
        },
        "/accelerator_requests/{uuid}": _in_path(uuid=UUID)
        | {
            "get": describe_operation(200, REQUEST),
            "post": requests,
            "patch": patch,
            "delete": describe_operation(204, None),
        },
        "/devices": {"get": describe_list_operation("devices", DEVICE, type=TEXT, vendor=TEXT, hostname=TEXT)},
        "/devices/{uuid}": _in_path(uuid=UUID) | {"get": describe_operation(200, DEVICE)},
        "/devices/{uuid}/enable": _in_path(uuid=UUID) | {"post": action},
        "/devices/{uuid}/disable": _in_path(uuid=UUID) | {"post": action},
        "/deployables": {"get": describe_list_operation("deployables", DEPLOYABLE)},
        "/deployables/{uuid}": _in_path(uuid=UUID) | {"get": describe_operation(200, DEPLOYABLE)},
        "/deployables/{uuid}/program": _in_path(uuid=UUID)
        | {"patch": describe_operation(200, DEPLOYABLE, 409, 503, body=PROGRAM)},
        "/attributes": {
            "get": describe_list_operation(
                "attributes", ATTRIBUTE, deployable_id={"type": "integer", "minimum": 0}, key=TEXT
            ),
            "post": attributes,
            "delete": describe_operation(204, None, uuid=UUID),
        },
        "/attributes/{uuid}": _in_path(uuid=UUID)
        | {"get": describe_operation(200, ATTRIBUTE), "post": attributes, "delete": describe_operation(204, None)},
    }
    security = {"token": {"type": "apiKey", "in": "header", "name": "X-Auth-Token"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Accelerator API v2", "version": "2.3"},
        "paths": {f"/accelerator/v2{path}": item for path, item in paths.items()},
        "components": {"securitySchemes": security},
        "security": [{"token": []}],
    }
