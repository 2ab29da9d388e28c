"""The forms of an HTML page. For our own API the fields come from serializers; for v2 they are defined here.

`static/api/forms.js` sends a form as JSON, so the page uses the API as any client does. No field loads rows to choose
from: a reference is entered as a uuid.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from django.core.exceptions import PermissionDenied
from rest_framework import exceptions, serializers
from rest_framework.request import Request, override_method

AS_JSON = (
    serializers.ListField,
    serializers.ListSerializer,
    serializers.DictField,
    serializers.JSONField,
    serializers.IntegerField,
)
"""Fields whose input is sent as JSON, and not as a string."""
WORDS = {"POST": "Create", "PATCH": "Change", "DELETE": "Delete"}


@dataclass(frozen=True)
class Field:
    """One input field. `kind` is text, area, json or choice."""

    name: str
    value: str = ""
    kind: str = "text"
    help: str = ""
    required: bool = False
    limit: int | None = None
    choices: tuple[tuple[str, str], ...] = ()
    several: bool = False


@dataclass(frozen=True)
class Form:
    """One action. With `body` the form sends that JSON after editing, with `fields` an object of their values,
    otherwise no body.

    `next_url` is the address to open afterwards; empty means the same page.
    """

    label: str
    method: str
    url: str
    fields: tuple[Field, ...] = ()
    body: str = ""
    then: str = ""
    danger: bool = False

    @property
    def rows(self) -> int:
        """Return the height of the input for the body: its lines and two spare ones."""
        return self.body.count("\n") + 3


def of_serializer(view: Any, request: Request, data: Any) -> Iterator[Form]:
    """Yield the forms of the actions that this caller may perform on this page of our own API, filled with current
    values."""
    if view.detail and view.verbs and view.allowed(view.policy_rules["POST"]):
        for verb in view.offered(data):
            danger = verb in view.dangerous
            yield Form(verb.capitalize(), "POST", f"{request.path.rstrip('/')}/{verb}/", danger=danger)
    for method in ("POST", "PATCH", "DELETE"):
        if method not in view.allowed_methods or not _may(view, request, method):
            continue
        if method == "DELETE":
            yield Form(WORDS[method], method, request.path, then=parent(request.path), danger=True)
            continue
        values = data if method == "PATCH" and isinstance(data, Mapping) else {}
        yield Form(WORDS[method], method, request.path, _fields(view, view.action_map[method.lower()], method, values))
    for word, action in () if view.detail else view.words.items():
        if view.allowed(f"cyborg:{view.policy}:{word}"):
            url = f"{request.path.rstrip('/')}/{word}/"
            yield Form(word.capitalize(), "POST", url, _fields(view, action, "POST", {}), danger=True)


def _fields(view: Any, action: str, method: str, values: Mapping[str, Any]) -> tuple[Field, ...]:
    """Return the input fields of an action, filled with the current `values`."""
    body = view.bodies[action]() if action in view.bodies else view.get_serializer()
    shown = body.fields.items()
    return tuple(_field(name, field, values.get(name), method) for name, field in shown if not field.read_only)


def _may(view: Any, request: Request, method: str) -> bool:
    with override_method(view, request, method) as asked:
        try:
            view.check_permissions(asked)
        except (exceptions.APIException, PermissionDenied):
            return False
    return True


def _field(name: str, field: serializers.Field, value: Any, method: str) -> Field:
    as_json = isinstance(field, AS_JSON)
    limit = getattr(field, "max_length", None)
    kind = "json" if as_json else "area" if limit and limit > 255 else "text"
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() if as_json and value is not None else value or ""
    return Field(name, text, kind, field.help_text or "", field.required and method == "POST", limit)


def of_filters(view: Any, params: Mapping[str, str], reserved: Collection[str] = ()) -> tuple[Field, ...]:
    """Return the filter fields of a list of our own API, filled with the query's values."""
    fields = []
    for name, one in view.filters().items():
        found = one.extra.get("choices", ()) or ((("true", "yes"), ("false", "no")) if _yes_no(one) else ())
        choices = tuple((str(value), str(label)) for value, label in found)
        kind = "choice" if choices else "text"
        fields.append(Field(name, params.get(name, ""), kind, one.extra.get("help_text", ""), choices=choices))
    orders = tuple((sign + word, sign + word) for word in view.orders for sign in ("", "-"))
    asked = params.get("ordering", view.default_order)
    return (*fields, Field("ordering", asked, "choice", "A leading - reverses the order.", choices=orders))


def _yes_no(one: Any) -> bool:
    return "Boolean" in type(one).__name__


PROFILE = [{"name": "", "description": "", "groups": [{"resources:FPGA": "1", "trait:CUSTOM_EXAMPLE": "required"}]}]
PROGRAM = [{"op": "replace", "path": "/program", "value": [{"image_uuid": ""}]}]
ATTRIBUTE = {"deployable_id": 0, "key": "", "value": ""}
V2: tuple[tuple[str, tuple[tuple[str, str, str, Any], ...]], ...] = (
    (r"device_profiles", (("Create", "POST", "", PROFILE),)),
    (r"device_profiles/[^/]+", (("Delete", "DELETE", "", None),)),
    (r"accelerator_requests", (("Create", "POST", "", {"device_profile_name": ""}),)),
    (r"accelerator_requests/[^/]+", (("Delete", "DELETE", "", None),)),
    (r"devices/[^/]+", (("Enable", "POST", "/enable", None), ("Disable", "POST", "/disable", None))),
    (r"deployables/[^/]+", (("Program", "PATCH", "/program", PROGRAM),)),
    (r"attributes", (("Create", "POST", "", ATTRIBUTE),)),
    (r"attributes/[^/]+", (("Delete", "DELETE", "", None),)),
)
"""For each path below v2 (contract section 2): the actions, each with label, method, path below the address, and
example body.

Binding is left out because it needs a service token, which no person has.
"""


def of_v2(path: str) -> Iterator[Form]:
    """Yield the forms for an address of v2. Permissions are not checked here; the API refuses what the caller may not
    do."""
    here = path.rstrip("/").removesuffix(".json")
    inner = re.sub(r"^(?:/accelerator)?(?:/v2)?/", "", here)
    for pattern, actions in V2:
        if re.fullmatch(pattern, inner):
            for label, method, below, body in actions:
                text = orjson.dumps(body, option=orjson.OPT_INDENT_2).decode() if body is not None else ""
                danger = method == "DELETE"
                yield Form(label, method, here + below, body=text, then=parent(here) if danger else "", danger=danger)


def parent(path: str) -> str:
    """Return the address one level above `path`."""
    return f"{path.rstrip('/').rpartition('/')[0]}{'/' if path.endswith('/') else ''}" or "/"
