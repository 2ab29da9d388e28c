"""The forms of an HTML page. For our own API the fields come from serializers; for v2 they are defined here.

`static/api/forms.js` sends a form as JSON, so the page uses the API as any client does. No field loads rows to choose
from: a reference is entered as a uuid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlencode

import django_filters as filters
import orjson
from django.urls import resolve
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


@dataclass(frozen=True)
class PageActions:
    """The actions of a page: the forms of those that the caller may perform, and the label of each other action with
    why the caller may not perform it now, and what would allow it."""

    forms: list[ActionForm]
    refused: list[tuple[str, str]]

    def add(self, label: str, refusal: str, build_form: Callable[[], ActionForm]) -> None:
        """Add an action: its form, or `refusal` if that is not ''."""
        if refusal:
            self.refused.append((label, refusal))
        else:
            self.forms.append(build_form())


def build_own_actions(view: Any, request: Request, data: Any) -> PageActions:
    """Return the actions of this page of our own API.

    A form that changes a member is filled with the current values, `data`. Each rule is checked once.
    """
    actions = PageActions([], [])
    if view.detail and view.member_actions:
        refusal = _explain_refusal(view, request, "POST", view.policy_rules["POST"])
        for verb in view.get_offered_actions(data):
            actions.add(verb.capitalize(), refusal, partial(_build_member_form, view, request, data, verb))
    for method in [method for method in LABEL_BY_METHOD if method in view.allowed_methods]:
        refusal = _explain_refusal(view, request, method)
        actions.add(LABEL_BY_METHOD[method], refusal, partial(_build_method_form, view, request, data, method))
    for word, action in [] if view.detail else list(view.collection_actions.items()):
        refusal = _explain_refusal(view, request, "POST", view.get_collection_rule(word))
        actions.add(word.capitalize(), refusal, partial(_build_collection_form, view, request, word, action))
    return actions


def _build_member_form(view: Any, request: Request, data: Any, verb: str) -> ActionForm:
    """Return the form of an action on one member; it has fields only if the action changes settings."""
    fields = _build_fields(view, verb, "POST", {"generation": data.get("generation", "")})
    changes_settings = any(one.name == "generation" for one in fields)
    return ActionForm(
        verb.capitalize(),
        "POST",
        f"{request.path.rstrip('/')}/{verb}/",
        fields if changes_settings else (),
        needs_confirmation=verb in view.actions_to_confirm,
    )


def _build_method_form(view: Any, request: Request, data: Any, method: str) -> ActionForm:
    """Return the form that creates, changes or deletes (POST, PATCH, DELETE) what the page shows, `data`."""
    if method == "DELETE":
        has_generation = "generation" in view.delete_parameters and isinstance(data, Mapping)
        query = f"?{urlencode({'generation': data.get('generation', '')})}" if has_generation else ""
        return ActionForm(
            LABEL_BY_METHOD[method],
            method,
            f"{request.path}{query}",
            next_url=get_parent_address(request.path),
            needs_confirmation=True,
        )
    values = data if method == "PATCH" and isinstance(data, Mapping) else {}
    fields = _build_fields(view, view.action_map[method.lower()], method, values)
    return ActionForm(LABEL_BY_METHOD[method], method, request.path, fields)


def _build_collection_form(view: Any, request: Request, word: str, action: str) -> ActionForm:
    """Return the form of an action on several members, whose word in the URL is `word`."""
    url = f"{request.path.rstrip('/')}/{word}/"
    return ActionForm(word.capitalize(), "POST", url, _build_fields(view, action, "POST", {}), needs_confirmation=True)


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


def build_v2_actions(request: Request) -> PageActions:
    """Return the actions of the page of v2 that was requested."""
    address = _strip_ending(request.path)
    v2_path = re.sub(r"^(?:/accelerator)?(?:/v2)?/", "", address)
    actions = PageActions([], [])
    for label, method, suffix, body in next(
        (listed for pattern, listed in V2_ACTIONS if re.fullmatch(pattern, v2_path)), ()
    ):
        view: Any = resolve(_strip_ending(request.path_info) + suffix).func.cls()  # type: ignore[attr-defined]  # DRF sets it
        refusal = _explain_refusal(view, request, method)
        actions.add(label, refusal, partial(_build_v2_form, address, label, method, suffix, body))
    return actions


def _strip_ending(path: str) -> str:
    """Return a path of v2 without the slash and the `.json` that may end it."""
    return path.rstrip("/").removesuffix(".json")


def _build_v2_form(address: str, label: str, method: str, suffix: str, body: Any) -> ActionForm:
    """Return the form of an action of V2_ACTIONS on the page `address`."""
    return ActionForm(
        label,
        method,
        address + suffix,
        body=orjson.dumps(body, option=orjson.OPT_INDENT_2).decode() if body is not None else "",
        next_url=get_parent_address(address) if method == "DELETE" else "",
        needs_confirmation=method == "DELETE",
    )


def get_parent_address(path: str) -> str:
    """Return the address one level above `path`, with a slash at its end if `path` has one; `/` at the top."""
    return f"{path.rstrip('/').rpartition('/')[0]}{'/' if path.endswith('/') else ''}" or "/"
