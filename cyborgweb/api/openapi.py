"""Generate the OpenAPI document of `/api/` from the code. `docs/openapi.yaml` is a copy, and a test compares the
two.

It is imported at the first request for the document, because drf-spectacular takes a while to import.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from inspect import getdoc
from typing import Any

from django.urls import include, path
from drf_spectacular import drainage
from drf_spectacular.extensions import OpenApiSerializerExtension, OpenApiSerializerFieldExtension
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.renderers import OpenApiJsonRenderer2, OpenApiYamlRenderer2
from drf_spectacular.utils import OpenApiParameter
from drf_spectacular.validation import validate_schema

from accelerators.api.own.errors import SENTENCES
from accelerators.domain import groups
from cyborgweb.manual import fields

ERRORS = {
    "400": "The query or the body contains an invalid value; the message names it and says what is valid.",
    "401": "There is no valid token in X-Auth-Token, and no session.",
    "403": "The policy does not allow this; the message names the rule.",
    "404": SENTENCES[404],
    "406": SENTENCES[406],
    "409": "The request conflicts with the current state; the message says why.",
    "413": SENTENCES[413],
    "415": SENTENCES[415],
    "503": "The database or the identity service does not answer; try again in a moment.",
}
ERROR = {
    "type": "object",
    "description": "The body of every error answer.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "title", "message", "request_id"],
            "properties": {
                "code": {"type": "integer", "description": "The HTTP status."},
                "title": {"type": "string"},
                "message": {"type": "string", "description": "One sentence that says what to do."},
                "request_id": {"type": "string", "description": "Identifies this request in logs and events."},
            },
        }
    },
}
SECURITY = {
    "token": {"type": "apiKey", "in": "header", "name": "X-Auth-Token"},
    "session": {"type": "apiKey", "in": "cookie", "name": "sessionid", "description": "A login to the console."},
}
TAG = {"ETag": {"description": "Stays valid until the data in the answer changes.", "schema": {"type": "string"}}}
CONDITION = {
    "in": "header",
    "name": "If-None-Match",
    "schema": {"type": "string"},
    "description": "An ETag of an earlier answer. While it is still valid, the answer is 304 without a body.",
}
COMBINATIONS = "x-combinations"
VERBS = {"list": "List", "retrieve": "Show", "create": "Create", "partial_update": "Change", "destroy": "Delete"}


class Schema(AutoSchema):
    """The part of the document for one view. Authentication is configured in the settings, so all views list the
    same schemes.
    """

    def get_auth(self) -> list[dict[str, list[str]]]:
        """Return all schemes; any one of them is enough."""
        return [{name: []} for name in SECURITY]

    def get_summary(self) -> str:
        """Return the summary: a verb and the resource, such as `List devices`."""
        names = self.view.basename.replace("_", " ")
        if said := self._word():
            return f"{said.capitalize()} {names}"
        word = VERBS.get(self.view.action) or self.view.action.capitalize()
        return f"{word} {names if self.view.action == 'list' else names.removesuffix('s')}"

    def get_description(self) -> str:
        """Return the description: the docstring of the action if it is a verb or has its own answer, otherwise that
        of the view.
        """
        own = self.view.action in self.view.verbs or self.view.action in self.view.answers
        return getdoc(getattr(self.view, self.view.action) if own else type(self.view)) or ""

    def get_operation_id(self) -> str:
        """Return the operation id, without drf-spectacular's `_create` for verbs and for actions of the collection."""
        made: str = super().get_operation_id()
        return made.removesuffix("_create") if self._word() or self.view.action in self.view.verbs else made

    def get_request_serializer(self) -> Any:
        """Return the serializer of the request body: that of the verb or the action, a binary body, or the view's
        own.
        """
        if self.view.action in self.view.verbs:
            return self.view.verbs[self.view.action]
        if body := self.view.bodies.get(self.view.action):
            return body
        if self.view.action == "create" and hasattr(self.view, "sends"):
            return {self.view.sends: {"type": "string", "format": "binary", "minLength": 1}}
        return super().get_request_serializer()

    def get_response_serializers(self) -> Any:
        """Return the serializer of the answer; some actions answer with something other than a row of the resource."""
        status, body = self.view.answers.get(self.view.action, (0, None))
        return {status: body} if body else super().get_response_serializers()

    def _word(self) -> str:
        """Return the path segment of an action on the whole collection, '' for any other action."""
        return next((word for word, action in self.view.words.items() if action == self.view.action), "")

    def get_override_parameters(self) -> list[Any]:
        """Return the query parameters: `fields` to choose from and, for lists, `ordering`; for an upload, what is
        sent with it.
        """
        if self.view.action == "create" and hasattr(self.view, "sent_with"):
            said = self.view.sent_with.items()
            return [OpenApiParameter(name, kind, description=about) for name, (kind, about) in said]
        if self.method != "GET":
            return []
        names = {"type": "array", "items": {"type": "string", "enum": [*self.view.get_serializer_class()().fields]}}
        shown = OpenApiParameter(
            "fields", names, style="form", explode=False, description="Only these fields are shown."
        )
        orders = [sign + word for word in self.view.orders for sign in ("", "-")]
        described = f"A leading - reverses the order; {self.view.default_order} if left out."
        if self.view.detail:
            return [shown, *(OpenApiParameter(name, **said) for name, said in self.view.parameters.items())]
        return [shown, OpenApiParameter("ordering", str, enum=orders, description=described)]


class Groups(OpenApiSerializerFieldExtension):
    """Schema of the groups in a device profile."""

    target_class = "accelerators.api.own.profiles.GroupsField"

    def map_serializer_field(self, auto_schema: AutoSchema, direction: str) -> dict[str, Any]:
        """Return the schema that matches the checks in `accelerators.domain.groups`."""
        classes = "|".join((*groups.CLASSES, "CUSTOM_.*"))
        keys = {
            f"^resources: *({classes})$": {"type": "string", "pattern": "^[0-9]{1,3}$"},
            "^trait: *CUSTOM_": {"type": "string", "enum": [*groups.TRAIT_VALUES]},
            "^accel:": {"type": "string", "maxLength": groups.MAX_TEXT},
        }
        group = {"type": "object", "patternProperties": keys, "additionalProperties": False}
        return {"type": "array", "minItems": 1, "maxItems": groups.MAX_GROUPS, "items": group}


class Combined(OpenApiSerializerExtension):
    """A body with fields that depend on each other."""

    target_class = "accelerators.api.own.fields.Closed"
    match_subclasses = True

    def map_serializer(self, auto_schema: AutoSchema, direction: str) -> dict[str, Any]:
        """Return the schema of its fields. For a request it also has the serializer's `field_conditions`, which
        `complete_document` moves into `allOf`.
        """
        schema: dict[str, Any] = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        said = self.target.combinations
        return schema | {COMBINATIONS: dict(said)} if said and direction == "request" else schema


class Target(OpenApiSerializerExtension):
    """Where the number of units is changed: given either by device, or by host and backend."""

    target_class = "accelerators.api.own.accelerators.TargetSerializer"
    priority = 1

    def map_serializer(self, auto_schema: AutoSchema, direction: str) -> dict[str, Any]:
        """Return the schema with the two alternatives."""
        schema: dict[str, Any] = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        ways = (["device"], ["host", "backend"])
        one = [{"required": names, "maxProperties": len(names)} for names in ways]
        return schema | {"oneOf": one, "additionalProperties": False}


class Settings(OpenApiSerializerFieldExtension):
    """Schema of a driver's settings."""

    target_class = "accelerators.api.own.rollouts.SettingsField"

    def map_serializer_field(self, auto_schema: AutoSchema, direction: str) -> dict[str, Any]:
        """Return the schema of an object with any properties."""
        return {"type": "object", "additionalProperties": {}}


class Named(OpenApiSerializerFieldExtension):
    """Schema of a field that is written as the uuid of a row and shown as a reference to it."""

    target_class = "accelerators.api.own.commands.Named"

    def map_serializer_field(self, auto_schema: AutoSchema, direction: str) -> dict[str, Any]:
        """Return the schema of a uuid for a request, and of the reference for an answer."""
        if direction == "request":
            return {"type": "string", "format": "uuid"}
        return auto_schema.resolve_serializer(self.target.reference, direction).ref


def complete(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Add to the document what drf-spectacular does not know: error responses, ETags, field descriptions and closed
    request bodies.
    """
    components = result.setdefault("components", {})
    components["securitySchemes"] = SECURITY
    components["schemas"] = {"Error": ERROR} | components["schemas"]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    components["responses"] = {
        f"Error{status}": {"description": text, "content": error} for status, text in ERRORS.items()
    }
    bodies = {_sent(operation) for _, _, operation in _operations(result)}
    for _, method, operation in _operations(result):
        for status in _possible(method):
            operation["responses"][status] = {"$ref": f"#/components/responses/Error{status}"}
        if body := operation.get("requestBody", {}):
            body["required"] = body.get("required", False) or "application/json" not in body["content"]
        if method == "get":
            operation["parameters"].append(CONDITION)
            operation["responses"]["200"] |= {"headers": TAG}
            operation["responses"]["304"] = {"description": "The answer that you have is still current."}
        for response in operation["responses"].values():
            response.get("content", {}).pop("text/html", None)
    for name, schema in components["schemas"].items():
        _describe(name, schema)
        if combinations := schema.pop(COMBINATIONS, None):
            schema["allOf"] = [combinations]
        if f"#/components/schemas/{name}" in bodies:
            schema["additionalProperties"] = False
        elif name != "Error" and not name.startswith("Paginated"):
            # A caller can choose which fields are returned, so none is required.
            schema.pop("required", None)
    return result


def _describe(name: str, schema: dict[str, Any]) -> None:
    """Describe fields that have no description in the code with the manual's sentence."""
    for field, said in schema.get("properties", {}).items():
        if said.keys().isdisjoint({"$ref", "description"}) and (sentence := fields.of_api(name, field)):
            said["description"] = sentence


def _operations(result: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for address, methods in result["paths"].items():
        for method, operation in methods.items():
            yield address, method, operation


def _sent(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    return str(content.get("application/json", {}).get("schema", {}).get("$ref", ""))


def _possible(method: str) -> list[str]:
    """Return the error statuses that are possible for a method. 404 is possible for lists (a bad cursor) and for
    creation (a row that is referred to) as well.
    """
    has_body, changes = method in ("post", "patch"), method != "get"
    never = {
        "409": not changes,
        "413": not has_body,
        "415": not has_body,
    }
    return [status for status in ERRORS if not never.get(status)]


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """Generate the OpenAPI document once per process. Raises ValueError if drf-spectacular had to guess anything."""
    drainage.reset_generator_stats()
    generator = SchemaGenerator(patterns=[path("api/", include("cyborgweb.api.root"))])
    made: dict[str, Any] = generator.get_schema(request=None, public=True)
    if drainage.GENERATOR_STATS:
        raise ValueError(f"the OpenAPI document has gaps: {drainage.GENERATOR_STATS._warn_cache}")
    return made


def validate() -> None:
    """Validate the document against OpenAPI's schema. Raises jsonschema's ValidationError. Takes a second, so do not
    call it in a request.
    """
    validate_schema(document())


def as_yaml() -> str:
    """Return the document as YAML."""
    return OpenApiYamlRenderer2().render(document(), renderer_context={}).decode()


def as_json() -> str:
    """Return the document as JSON."""
    return OpenApiJsonRenderer2().render(document(), renderer_context={}).decode()
