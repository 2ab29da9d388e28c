"""What a person can do on a page of an API, as forms: their fields come from serializers on ours, from here on v2.

Called by `browsable`. Sent by `static/api/forms.js` as JSON, so that the page does what any client does. No field loads
rows to choose from: what refers to something takes its uuid.
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
"""What the page sends as it was typed, and not as text."""
WORDS = {"POST": "Create", "PATCH": "Change", "DELETE": "Delete"}


@dataclass(frozen=True)
class Field:
    """One input. `kind`: text, area, json, or choice."""

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
    """One thing to do. With `body` it sends that JSON, edited; with `fields` an object of them; else nothing.

    `then` is where to go when it is done, by default the same page.
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
        """Lines of the body, and two to write on."""
        return self.body.count("\n") + 3


def of_serializer(view: Any, request: Request, data: Any) -> Iterator[Form]:
    """What this caller may do here on our own API, with the values there are."""
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
    """The inputs of an action, with the values there are."""
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
    """The filters of a list on our own API, with what was asked."""
    fields = []
    for name, one in view.filters().items():
        found = one.extra.get("choices", ()) or ((("true", "yes"), ("false", "no")) if _yes_no(one) else ())
        choices = tuple((str(value), str(label)) for value, label in found)
        kind = "choice" if choices else "text"
        fields.append(Field(name, params.get(name, ""), kind, one.extra.get("help_text", ""), choices=choices))
    orders = tuple((sign + word, sign + word) for word in view.orders for sign in ("", "-"))
    asked = params.get("ordering", view.default_order)
    return (*fields, Field("ordering", asked, "choice", "A - turns it around.", choices=orders))


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
"""Per address below v2 (contract section 2): what can be done, how, at which address below it, and an example body.

Binding is not among it: it takes a service token, which no person has.
"""


def of_v2(path: str) -> Iterator[Form]:
    """What can be done at an address of v2; whether this caller may is found out by doing it."""
    here = path.rstrip("/").removesuffix(".json")
    inner = re.sub(r"^(?:/accelerator)?(?:/v2)?/", "", here)
    for pattern, actions in V2:
        if re.fullmatch(pattern, inner):
            for label, method, below, body in actions:
                text = orjson.dumps(body, option=orjson.OPT_INDENT_2).decode() if body is not None else ""
                danger = method == "DELETE"
                yield Form(label, method, here + below, body=text, then=parent(here) if danger else "", danger=danger)


def parent(path: str) -> str:
    """The address above."""
    return f"{path.rstrip('/').rpartition('/')[0]}{'/' if path.endswith('/') else ''}" or "/"
