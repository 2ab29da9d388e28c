"""The forms of an HTML page. For our own API the fields come from serializers; for v2 they are defined here.

`static/api/forms.js` sends a form as JSON, so the page uses the API as any client does. No field loads rows to choose
from: a reference is entered as a uuid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import django_filters as filters
import orjson
from rest_framework import serializers
from rest_framework.request import Request, override_method

JSON_FIELD_TYPES = (
    serializers.ListField,
    serializers.ListSerializer,
    serializers.DictField,
    serializers.JSONField,
    serializers.IntegerField,
    serializers.BooleanField,
)
"""Fields whose input is sent as JSON, and not as a string."""
BOOLEAN_CHOICES = (("true", "yes"), ("false", "no"))
LABEL_BY_METHOD = {"POST": "Create", "PATCH": "Change", "DELETE": "Delete"}


@dataclass(frozen=True)
class FormField:
    """One input field. `kind` is text, area, json or choice; `value` is the text that it shows at first.

    `choices` are pairs of value and label; with `is_json` each value is sent as JSON, and not as a string. Without
    `max_length` the length is not limited. A form that changes a member sends only the fields that were edited, and
    those that are `always_sent`.
    """

    name: str
    value: str = ""
    kind: str = "text"
    help: str = ""
    required: bool = False
    max_length: int | None = None
    choices: tuple[tuple[str, str], ...] = ()
    always_sent: bool = False
    is_json: bool = False


@dataclass(frozen=True)
class ActionForm:
    """One action. With `body` the form sends that JSON after editing, with `fields` an object of their values,
    otherwise no body.

    `next_url` is the address to open afterwards; empty means the same page.
    """

    label: str
    method: str
    url: str
    fields: tuple[FormField, ...] = ()
    body: str = ""
    next_url: str = ""
    needs_confirmation: bool = False

    @property
    def rows(self) -> int:
        """Return the height of the input for the body: its lines and two spare ones."""
        return self.body.count("\n") + 3


def build_own_forms(view: Any, request: Request, data: Any) -> Iterator[ActionForm]:
    """Yield the forms of the actions that this caller may perform on this page of our own API.

    A form that changes a member is filled with the current values, `data`. Actions that the policy forbids are left
    out; `list_refused_actions` has them.
    """
    if view.detail and view.member_actions and not _explain_refusal(view, request, "POST", view.policy_rules["POST"]):
        for verb in view.get_offered_actions(data):
            danger = verb in view.actions_to_confirm
            fields = _build_fields(view, verb, "POST", {"generation": data.get("generation", "")})
            changes_settings = any(field.name == "generation" for field in fields)
            yield ActionForm(
                verb.capitalize(),
                "POST",
                f"{request.path.rstrip('/')}/{verb}/",
                fields if changes_settings else (),
                needs_confirmation=danger,
            )
    for method in _list_form_methods(view):
        if _explain_refusal(view, request, method):
            continue
        if method == "DELETE":
            has_generation = "generation" in view.delete_parameters and isinstance(data, Mapping)
            yield ActionForm(
                LABEL_BY_METHOD[method],
                method,
                f"{request.path}?{urlencode({'generation': data.get('generation', '')})}"
                if has_generation
                else request.path,
                next_url=get_parent_address(request.path),
                needs_confirmation=True,
            )
            continue
        values = data if method == "PATCH" and isinstance(data, Mapping) else {}
        yield ActionForm(
            LABEL_BY_METHOD[method],
            method,
            request.path,
            _build_fields(view, view.action_map[method.lower()], method, values),
        )
    for word, action in _list_collection_actions(view):
        if not _explain_refusal(view, request, "POST", view.get_collection_rule(word)):
            url = f"{request.path.rstrip('/')}/{word}/"
            yield ActionForm(
                word.capitalize(), "POST", url, _build_fields(view, action, "POST", {}), needs_confirmation=True
            )


def list_refused_actions(view: Any, request: Request, data: Any) -> list[tuple[str, str]]:
    """Return the actions of this page of our own API that the caller may not perform now, each with the reason and with
    what would allow it."""
    refusals = [
        (LABEL_BY_METHOD[method], _explain_refusal(view, request, method)) for method in _list_form_methods(view)
    ]
    if view.detail and view.member_actions:
        refusal = _explain_refusal(view, request, "POST", view.policy_rules["POST"])
        refusals += [(verb.capitalize(), refusal) for verb in view.get_offered_actions(data)]
    for word, _ in _list_collection_actions(view):
        refusals.append((word.capitalize(), _explain_refusal(view, request, "POST", view.get_collection_rule(word))))
    return [(label, refusal) for label, refusal in refusals if refusal]


def _list_form_methods(view: Any) -> list[str]:
    """Return the methods of this page that create, change or delete something."""
    return [method for method in LABEL_BY_METHOD if method in view.allowed_methods]


def _list_collection_actions(view: Any) -> list[tuple[str, str]]:
    """Return the actions on several members of this list, each with its word in the URL; [] on the page of a member."""
    return [] if view.detail else list(view.collection_actions.items())


def _build_fields(view: Any, action: str, method: str, values: Mapping[str, Any]) -> tuple[FormField, ...]:
    """Return the input fields of an action, filled with the current `values`."""
    fields = view.get_body_serializer_class(action)(context=view.get_serializer_context()).fields.items()
    return tuple(_build_field(name, field, values.get(name), method) for name, field in fields if not field.read_only)


def _explain_refusal(view: Any, request: Request, method: str, rule: str = "") -> str:
    """Return why the caller may not use the method on this page, or do what needs `rule` with it; '' if the caller may.
    The answer is also a reason while everything is read only."""
    with override_method(view, request, method) as override_request:
        return str(view.explain_refusal(override_request, rule))


def _build_field(name: str, field: serializers.Field[Any, Any, Any, Any], value: Any, method: str) -> FormField:
    """Return the input field for a field of a serializer, filled with `value`; it is required only in a POST."""
    is_json = isinstance(field, JSON_FIELD_TYPES)
    max_length = getattr(field, "max_length", None)
    kind = "json" if is_json else "area" if max_length and max_length > 255 else "text"
    choices = BOOLEAN_CHOICES if isinstance(field, serializers.BooleanField) else _list_choices(field)
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() if is_json and value is not None else value or ""
    is_required = field.required and method == "POST"
    always_sent = name == "generation" and method == "PATCH"
    return FormField(
        *(name, text, "choice" if choices else kind, str(field.help_text or ""), is_required, max_length, choices),
        always_sent=always_sent,
        is_json=is_json,
    )


def _list_choices(field: serializers.Field[Any, Any, Any, Any]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of value and label of a field with a fixed set of values, of which one is chosen; () for
    others."""
    if not isinstance(field, serializers.ChoiceField) or isinstance(field, serializers.MultipleChoiceField):
        return ()
    return tuple((str(value), str(label)) for value, label in field.choices.items() if value != "")


def build_filter_fields(view: Any, params: Mapping[str, str]) -> tuple[FormField, ...]:
    """Return the filter fields of a list of our own API, and the field `ordering`, filled with the query's values."""
    fields = []
    for name, query_filter in view.get_filters().items():
        options = query_filter.extra.get("choices", ()) or (
            BOOLEAN_CHOICES if isinstance(query_filter, filters.BooleanFilter) else ()
        )
        choices = tuple((str(value), str(label)) for value, label in options)
        kind = "choice" if choices else "text"
        fields.append(
            FormField(name, params.get(name, ""), kind, query_filter.extra.get("help_text", ""), choices=choices)
        )
    orders = tuple((ordering, ordering) for ordering in view.list_orderings())
    ordering = params.get("ordering", view.default_ordering)
    return (*fields, FormField("ordering", ordering, "choice", "A leading - reverses the order.", choices=orders))


EXAMPLE_PROFILE = [
    {"name": "", "description": "", "groups": [{"resources:FPGA": "1", "trait:CUSTOM_EXAMPLE": "required"}]}
]
EXAMPLE_PROGRAM = [{"op": "replace", "path": "/program", "value": [{"image_uuid": ""}]}]
EXAMPLE_ATTRIBUTE = {"deployable_id": 0, "key": "", "value": ""}
V2_ACTIONS: tuple[tuple[str, tuple[tuple[str, str, str, Any], ...]], ...] = (
    (r"device_profiles", (("Create", "POST", "", EXAMPLE_PROFILE),)),
    (r"device_profiles/[^/]+", (("Delete", "DELETE", "", None),)),
    (r"accelerator_requests", (("Create", "POST", "", {"device_profile_name": ""}),)),
    (r"accelerator_requests/[^/]+", (("Delete", "DELETE", "", None),)),
    (r"devices/[^/]+", (("Enable", "POST", "/enable", None), ("Disable", "POST", "/disable", None))),
    (r"deployables/[^/]+", (("Program", "PATCH", "/program", EXAMPLE_PROGRAM),)),
    (r"attributes", (("Create", "POST", "", EXAMPLE_ATTRIBUTE),)),
    (r"attributes/[^/]+", (("Delete", "DELETE", "", None),)),
)
"""For each path below v2 (contract section 2): the actions, each with label, method, path below the address, and
example body.

Binding is left out because it needs a service token, which no person has.
"""


def build_v2_forms(path: str) -> Iterator[ActionForm]:
    """Yield the forms for an address of v2. Permissions are not checked here; the API refuses what the caller may not
    do."""
    address = path.rstrip("/").removesuffix(".json")
    v2_path = re.sub(r"^(?:/accelerator)?(?:/v2)?/", "", address)
    for pattern, actions in V2_ACTIONS:
        if re.fullmatch(pattern, v2_path):
            for label, method, suffix, body in actions:
                text = orjson.dumps(body, option=orjson.OPT_INDENT_2).decode() if body is not None else ""
                danger = method == "DELETE"
                yield ActionForm(
                    label,
                    method,
                    address + suffix,
                    body=text,
                    next_url=get_parent_address(address) if danger else "",
                    needs_confirmation=danger,
                )


def get_parent_address(path: str) -> str:
    """Return the address one level above `path`, with a slash at its end if `path` has one; `/` at the top."""
    return f"{path.rstrip('/').rpartition('/')[0]}{'/' if path.endswith('/') else ''}" or "/"
