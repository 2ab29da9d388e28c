"""Generate the OpenAPI document of `/api/` from the code. `docs/openapi.yaml` is a copy, and a test compares the
two.

It is imported at the first request for the document, because drf-spectacular takes a while to import.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from inspect import getdoc
from typing import Any, cast

from django.urls import include, path
from drf_spectacular import drainage
from drf_spectacular.extensions import OpenApiSerializerExtension, OpenApiSerializerFieldExtension
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.renderers import OpenApiJsonRenderer2, OpenApiYamlRenderer2
from drf_spectacular.utils import Direction, OpenApiParameter
from drf_spectacular.validation import validate_schema
from rest_framework.serializers import Serializer

from accelerators.api.own.errors import MESSAGE_BY_STATUS, REASONS
from accelerators.api.own.views import CollectionView
from accelerators.domain import groups
from cyborgweb.manual import fields

ERROR_DESCRIPTIONS = {
    "400": "The query or the body contains an invalid value; the message names it and says what is valid.",
    "401": "There is no valid token in X-Auth-Token, and no session.",
    "403": "The policy does not allow this; the message names the rule.",
    "404": MESSAGE_BY_STATUS[404],
    "406": MESSAGE_BY_STATUS[406],
    "409": "The request conflicts with the current state, or has to be confirmed with the token of its preview; the"
    " message says why.",
    "413": MESSAGE_BY_STATUS[413],
    "415": MESSAGE_BY_STATUS[415],
    "428": "The change does not say on which `generation` it is based; the message has the present one.",
    "503": "The database or the identity service does not answer; try again in a moment.",
}
ERROR_SCHEMA = {
    "type": "object",
    "description": "The body of every error answer.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "title", "message", "request_id", "reason"],
            "properties": {
                "code": {"type": "integer", "description": "The HTTP status."},
                "title": {"type": "string"},
                "message": {"type": "string", "description": "One sentence that says what to do."},
                "request_id": {"type": "string", "description": "Identifies this request in logs and events."},
                "reason": {"type": "string", "enum": REASONS, "description": "A stable code for programs."},
            },
        },
        "preview": {
            "type": "object",
            "description": "Only with the reason `not_confirmed`: the preview that a request with `dry_run` answers.",
        },
        "current": {
            "type": "object",
            "description": "The present version, if a change was refused because it is based on an older generation, or"
            " on none.",
        },
    },
}
SECURITY_SCHEMES = {
    "token": {"type": "apiKey", "in": "header", "name": "X-Auth-Token"},
    "session": {"type": "apiKey", "in": "cookie", "name": "sessionid", "description": "A login to the console."},
}
ETAG_HEADER = {
    "ETag": {"description": "Stays valid until the data in the answer changes.", "schema": {"type": "string"}}
}
IF_NONE_MATCH_PARAMETER = {
    "in": "header",
    "name": "If-None-Match",
    "schema": {"type": "string"},
    "description": "An ETag of an earlier answer. While it is still valid, the answer is 304 without a body.",
}
FIELD_CONDITIONS_KEY = "x-combinations"
DELETE_PARAMETERS: dict[str, tuple[type, str]] = {
    "generation": (int, "The generation as you read it. If it has changed since, the answer is 409; without it, 428."),
    "reason": (str, "Shown with the change and in its events."),
}
SUMMARY_VERBS = {
    "list": "List",
    "retrieve": "Show",
    "create": "Create",
    "partial_update": "Change",
    "destroy": "Delete",
}


class ViewSchema(AutoSchema):
    """The part of the OpenAPI document for one view of our own API.

    Authentication is configured in the settings, so all views list the same security schemes.
    """

    @property
    def collection(self) -> CollectionView:
        """The view that this schema describes. Only collections of our own API use this schema."""
        return cast(CollectionView, self.view)

    def get_auth(self) -> list[dict[str, list[str]]]:
        """Return the security schemes of an operation. They are the same for all: a token or a session is enough."""
        return [{name: []} for name in SECURITY_SCHEMES]

    def get_summary(self) -> str:
        """Return the operation's summary in the OpenAPI document: a verb and the resource, such as `List devices`."""
        names = self.collection.basename.replace("_", " ")
        if action_name := self.collection.collection_action_name:
            return f"{action_name.capitalize()} {names}"
        verb = SUMMARY_VERBS.get(self.collection.action) or self.collection.action.capitalize()
        return f"{verb} {names if self.collection.action == 'list' else names.removesuffix('s')}"

    def get_description(self) -> str:  # type: ignore[override]  # drf-spectacular has dropped DRF's parameters
        """Return the operation's description in the OpenAPI document: the docstring of the view's action if it is a
        verb such as `replay` or has an answer of its own, otherwise the docstring of the view.
        """
        uses_action_docstring = (
            self.collection.action in self.collection.member_actions
            or self.collection.action in self.collection.response_serializers
        )
        return (
            getdoc(getattr(self.collection, self.collection.action) if uses_action_docstring else type(self.collection))
            or ""
        )

    def get_operation_id(self) -> str:
        """Return drf-spectacular's operation id. For verbs of a member or of the collection, without its ending
        `_create`, which they have because they are sent by POST.
        """
        operation_id: str = super().get_operation_id()
        return (
            operation_id.removesuffix("_create")
            if self.collection.collection_action_name or self.collection.action in self.collection.member_actions
            else operation_id
        )

    def get_request_serializer(self) -> Any:
        """Return the serializer of the operation's request body; for an upload, a binary schema by media type."""
        if self.collection.action == "create" and hasattr(self.collection, "upload_media_type"):
            return {self.collection.upload_media_type: {"type": "string", "format": "binary", "minLength": 1}}
        return self.collection.get_body_serializer_class(self.collection.action)

    def get_response_serializers(self) -> Any:
        """Return the serializer of a successful answer, as status → serializer if the view names one for this action;
        otherwise the view's own serializer.
        """
        status, body = self.collection.response_serializers.get(self.collection.action, (0, None))
        preview = self.collection.preview_serializers.get(self.collection.action)
        if preview and not body:  # Both the row and the preview are answered with 200.
            row = cast("type[Serializer[Any]]", self.collection.get_serializer_class())
            return {200: {"anyOf": [self.resolve_serializer(one, "response").ref for one in (row, preview)]}}
        previews = {200: preview} if preview else {}
        return previews | {status: body} if body else super().get_response_serializers()

    def get_override_parameters(self) -> list[Any]:
        """Return the query parameters that drf-spectacular cannot find in the code.

        For GET they are `fields`, and `ordering` for a list or the view's own parameters for a member; for an upload
        they are what is sent with it, such as `name`.
        """
        if self.collection.action == "create" and hasattr(self.collection, "upload_parameters"):
            upload_parameters = self.collection.upload_parameters.items()
            return [OpenApiParameter(name, kind, description=about) for name, (kind, about) in upload_parameters]
        if self.method == "DELETE":
            return [
                OpenApiParameter(
                    name,
                    DELETE_PARAMETERS[name][0],
                    description=DELETE_PARAMETERS[name][1],
                    required=name == "generation",
                )
                for name in self.collection.delete_parameters
            ]
        if self.method != "GET":
            return []
        serializer = cast("type[Serializer[Any]]", self.collection.get_serializer_class())()
        field_names = {"type": "array", "items": {"type": "string", "enum": [*serializer.fields]}}
        fields_parameter = OpenApiParameter(
            "fields", field_names, style="form", explode=False, description="Only these fields are shown."
        )
        ordering_description = f"A leading - reverses the order; {self.collection.default_ordering} if left out."
        if self.collection.detail:
            return [
                fields_parameter,
                *(OpenApiParameter(name, **said) for name, said in self.collection.detail_parameters.items()),
            ]
        return [
            fields_parameter,
            OpenApiParameter("ordering", str, enum=self.collection.list_orderings(), description=ordering_description),
        ]


class GroupsFieldExtension(OpenApiSerializerFieldExtension):
    """Schema of the groups in a device profile."""

    target_class = "accelerators.api.own.profiles.GroupsField"

    def map_serializer_field(self, auto_schema: AutoSchema, direction: Direction) -> dict[str, Any]:
        """Return the schema of a profile's groups; it matches the checks in `accelerators.domain.groups`."""
        classes = "|".join((*groups.RESOURCE_CLASSES, "CUSTOM_.*"))
        keys = {
            f"^resources: *({classes})$": {"type": "string", "pattern": "^[0-9]{1,3}$"},
            "^trait: *CUSTOM_": {"type": "string", "enum": [*groups.TRAIT_VALUES]},
            "^accel:": {"type": "string", "maxLength": groups.MAX_TEXT_LENGTH},
        }
        group = {"type": "object", "patternProperties": keys, "additionalProperties": False}
        return {"type": "array", "minItems": 1, "maxItems": groups.MAX_GROUPS, "items": group}


class ClosedSerializerExtension(OpenApiSerializerExtension):
    """Schema of request bodies that accept no unknown fields and whose fields may depend on each other."""

    target_class = "accelerators.api.own.fields.ClosedSerializer"
    match_subclasses = True

    def map_serializer(self, auto_schema: AutoSchema, direction: Direction) -> dict[str, Any]:
        """Return the schema of the serializer's fields. For a request it also has the serializer's `field_conditions`,
        under the key FIELD_CONDITIONS_KEY, from which `complete_document` moves them into `allOf`.
        """
        schema: dict[str, Any] = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        conditions = self.target.field_conditions
        return schema | {FIELD_CONDITIONS_KEY: dict(conditions)} if conditions and direction == "request" else schema


class TargetSerializerExtension(OpenApiSerializerExtension):
    """Schema of a target of a change of the number of units: either a device, or a host and a backend."""

    target_class = "accelerators.api.own.accelerators.TargetSerializer"
    priority = 1

    def map_serializer(self, auto_schema: AutoSchema, direction: Direction) -> dict[str, Any]:
        """Return the schema of one target: it has either the field `device`, or the fields `host` and `backend`."""
        schema: dict[str, Any] = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        alternatives = (["device"], ["host", "backend"])
        schemas = [{"required": names, "maxProperties": len(names)} for names in alternatives]
        return schema | {"oneOf": schemas, "additionalProperties": False}


class SettingsFieldExtension(OpenApiSerializerFieldExtension):
    """Schema of a driver's settings."""

    target_class = "accelerators.api.own.rollouts.SettingsField"

    def map_serializer_field(self, auto_schema: AutoSchema, direction: Direction) -> dict[str, Any]:
        """Return the schema of a driver's settings: an object with any properties."""
        return {"type": "object", "additionalProperties": {}}


class UuidReferenceFieldExtension(OpenApiSerializerFieldExtension):
    """Schema of a field that is written as the uuid of a row and shown as a reference to it."""

    target_class = "accelerators.api.own.commands.UuidReferenceField"

    def map_serializer_field(self, auto_schema: AutoSchema, direction: Direction) -> dict[str, Any]:
        """Return the schema of a uuid for a request, and of the reference for an answer."""
        if direction == "request":
            return {"type": "string", "format": "uuid"}
        reference: dict[str, Any] = auto_schema.resolve_serializer(self.target.reference, direction).ref
        return reference


def complete_document(result: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Add to the OpenAPI document what drf-spectacular does not know: error responses, ETags, field descriptions, and
    that request bodies accept no unknown fields. Changes `result` and returns it.
    """
    components = result.setdefault("components", {})
    components["securitySchemes"] = SECURITY_SCHEMES
    components["schemas"] = {"Error": ERROR_SCHEMA} | components["schemas"]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    components["responses"] = {
        f"Error{status}": {"description": text, "content": error} for status, text in ERROR_DESCRIPTIONS.items()
    }
    bodies = {_get_body_reference(operation) for _, _, operation in _iterate_operations(result)}
    for _, method, operation in _iterate_operations(result):
        for status in _get_possible_errors(method, _takes_generation(operation, components["schemas"])):
            operation["responses"][status] = {"$ref": f"#/components/responses/Error{status}"}
        if body := operation.get("requestBody", {}):
            body["required"] = body.get("required", False) or "application/json" not in body["content"]
        if method == "get":
            operation["parameters"].append(IF_NONE_MATCH_PARAMETER)
            operation["responses"]["200"] |= {"headers": ETAG_HEADER}
            operation["responses"]["304"] = {"description": "The answer that you have is still current."}
        for response in operation["responses"].values():
            response.get("content", {}).pop("text/html", None)
    for name, schema in components["schemas"].items():
        _add_field_descriptions(name, schema)
        if combinations := schema.pop(FIELD_CONDITIONS_KEY, None):
            schema["allOf"] = [combinations]
        if f"#/components/schemas/{name}" in bodies:
            schema["additionalProperties"] = False
        elif name != "Error" and not name.startswith("Paginated"):
            # A caller can choose which fields are returned, so none is required.
            schema.pop("required", None)
    return result


def _add_field_descriptions(name: str, schema: dict[str, Any]) -> None:
    """Add the manual's sentence to each field of the schema `name` that has no description in the code."""
    for field, field_schema in schema.get("properties", {}).items():
        if field_schema.keys().isdisjoint({"$ref", "description"}) and (
            sentence := fields.api_field_sentence(name, field)
        ):
            field_schema["description"] = sentence


def _iterate_operations(result: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each operation of the OpenAPI document with its address and its method (in lower case)."""
    for address, methods in result["paths"].items():
        for method, operation in methods.items():
            yield address, method, operation


def _get_body_reference(operation: dict[str, Any]) -> str:
    """Return the reference to the schema of the operation's JSON body; '' if there is none."""
    content = operation.get("requestBody", {}).get("content", {})
    return str(content.get("application/json", {}).get("schema", {}).get("$ref", ""))


def _takes_generation(operation: dict[str, Any], schemas: dict[str, Any]) -> bool:
    """Return whether the operation changes settings that have a generation: its body or its query takes one."""
    body = schemas.get(_get_body_reference(operation).rpartition("/")[2], {})
    in_query = any(parameter["name"] == "generation" for parameter in operation.get("parameters", ()))
    return in_query or "generation" in body.get("properties", {})


def _get_possible_errors(method: str, takes_generation: bool) -> list[str]:
    """Return the error statuses that are possible for a method, as texts: 409 only for methods that change something,
    413 and 415 only for methods with a body, 428 only if it takes a generation, and all others of ERROR_DESCRIPTIONS.

    404 is possible for every method: a list answers it for a bad cursor, and a creation if its body refers to a row
    that does not exist.
    """
    has_body, changes = method in ("post", "patch"), method != "get"
    impossible = {
        "409": not changes,
        "413": not has_body,
        "415": not has_body,
        "428": not takes_generation,
    }
    return [status for status in ERROR_DESCRIPTIONS if not impossible.get(status)]


@lru_cache(maxsize=1)
def generate_document() -> dict[str, Any]:
    """Generate the OpenAPI document once per process. Raises ValueError if drf-spectacular had to guess anything."""
    drainage.reset_generator_stats()
    generator = SchemaGenerator(patterns=[path("api/", include("cyborgweb.api.root"))])
    schema: dict[str, Any] = generator.get_schema(request=None, public=True)
    if drainage.GENERATOR_STATS:
        raise ValueError(f"the OpenAPI document has gaps: {drainage.GENERATOR_STATS._warn_cache}")
    return schema


def validate_document() -> None:
    """Validate our OpenAPI document against OpenAPI's schema. Takes a second, so do not call it in a request.

    Raises jsonschema's ValidationError if it is invalid, ValueError as `generate_document` does.
    """
    validate_schema(generate_document())


def render_yaml() -> str:
    """Return the OpenAPI document as YAML. Raises ValueError as `generate_document` does."""
    document: bytes = OpenApiYamlRenderer2().render(generate_document(), renderer_context={})
    return document.decode()


def render_json() -> str:
    """Return the OpenAPI document as JSON. Raises ValueError as `generate_document` does."""
    document: bytes = OpenApiJsonRenderer2().render(generate_document(), renderer_context={})
    return document.decode()
