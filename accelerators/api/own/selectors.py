"""Selectors: how the body of a request selects many objects by uuids or by the filters of their list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import django_filters as filters
from django.db.models import QuerySet
from django.http import QueryDict
from rest_framework import serializers

from accelerators.api.own.inventory import DeviceFilter, DeviceView

MAX_NAMED_OBJECTS = 20_000
"""Maximum number of objects that a body names; their uuids fit into a body. A selector may match more."""


@dataclass(frozen=True)
class Selectable:
    """The objects of one kind, and how a body selects them.

    `field` is the field of the body that names them, and `selector_filters` are the filters that a selector may have.
    A caller with `read_rule` sees the bulk actions on objects of the own project, one with `read_all_rule` those on all
    objects. A caller with `change_all_rule` may change the objects of all projects. The rules are '' for devices, which
    have no project.
    """

    field: str
    filter_class: type[filters.FilterSet]
    rows: QuerySet[Any]
    excluded_filters: tuple[str, ...] = ()
    read_rule: str = ""
    read_all_rule: str = ""
    change_all_rule: str = ""

    @property
    def selector_filters(self) -> Mapping[str, filters.Filter]:
        """Return the filters of a selector: those of the list, without `excluded_filters` and saved views."""
        filters_of_list = self.filter_class.base_filters
        excluded = {"saved_view", *self.excluded_filters}
        return {name: one for name, one in filters_of_list.items() if name not in excluded}


DEVICES = Selectable("devices", DeviceFilter, DeviceView.queryset)


class SelectorField(serializers.JSONField):
    """A selector: `{"all": true}`, or filters of the list with their values. `check_selector` checks the filters."""

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        """Return the selector; raise ValidationError if it is no object, or empty."""
        if not isinstance(data, dict) or not data:
            raise serializers.ValidationError('Say {"all": true}, or filters such as {"state": "inactive"}.')
        return data


def check_selector(selectable: Selectable, selector: Mapping[str, Any]) -> None:
    """Raise ValidationError (400) if a filter of a selector, or its value, does not exist, or if a filter has several
    values and takes only one: the last one would select other objects than the caller means."""
    if selector == {"all": True}:
        return
    known_filters = selectable.selector_filters
    if unknown := sorted(set(selector) - known_filters.keys()):
        text = f"{', '.join(unknown)[:200]}: unknown filter; known are {', '.join(known_filters)}."
        raise serializers.ValidationError({"selector": text})
    for name, value in selector.items():
        takes_several = isinstance(known_filters[name], filters.MultipleChoiceFilter)
        if isinstance(value, list) and len(value) > 1 and not takes_several:
            raise serializers.ValidationError({"selector": f"{name}: it takes one value, not a list."})
    form = selectable.filter_class(_build_query(selector), selectable.rows.all()).form
    if not form.is_valid():
        name, texts = next(iter(form.errors.items()))
        raise serializers.ValidationError({"selector": f"{name}: {texts[0]}"})


def _build_query(selector: Mapping[str, Any]) -> QueryDict:
    """Return the query of a list that means the same as a selector. Raises ValidationError for a value of another type
    than text, boolean or list of texts, and for empty text."""
    query = QueryDict(mutable=True)
    for name, value in selector.items():
        words = value if isinstance(value, list) and value else [value]
        texts = [str(word).lower() if isinstance(word, bool) else word for word in words]
        if not all(isinstance(text, str) and text for text in texts):
            raise serializers.ValidationError({"selector": f"{name}: say a text, true or false, or a list of texts."})
        query.setlist(name, texts)
    return query


def select_rows(selectable: Selectable, selector: Mapping[str, Any]) -> QuerySet[Any]:
    """Return the rows of the list that a selector selects, which `check_selector` has accepted."""
    rows: QuerySet[Any] = selectable.rows.all()
    if "all" in selector:
        return rows
    selected: QuerySet[Any] = selectable.filter_class(_build_query(selector), rows).qs
    return selected
