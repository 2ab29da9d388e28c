"""The search page `/admin/find/?q=…`: finds uuids by their first digits, PCI addresses, hosts, instances, serial
numbers and profiles.

A search is one statement that uses indexes only, is limited for each kind, and covers only kinds that the user may
view. A single result opens its page; several are listed by kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import or_
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.db.models import BooleanField, Case, CharField, F, Q, QuerySet, Value, When
from django.db.models.functions import Cast, Concat
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from accelerators.models import AcceleratorRequest, AttachHandle, Command, Deployable, Device, DeviceProfile, Host
from accelerators.ui import badges

EACH = 20
"""Results that are listed for each kind."""
LONGEST = 255
LEAST_HEX = 4
"""Fewest hexadecimal digits for which uuids are searched."""
ADDRESS = re.compile(r"(?:([0-9a-f]{4}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7])?)?", re.IGNORECASE)


@dataclass(frozen=True)
class Kind:
    """What can be found: `uuids` and `names` are fields that are searched by prefix; `shown` is the result's text,
    `beside` the text next to it.
    """

    model: type[Any]
    uuids: tuple[str, ...]
    names: tuple[str, ...]
    shown: Any
    beside: Any

    @property
    def name(self) -> str:
        """The model's name as it appears in permissions and addresses."""
        return str(self.model._meta.model_name)


KINDS = (
    Kind(Host, ("uuid",), ("name",), F("name"), F("node")),
    Kind(Device, ("uuid",), ("address", "key"), Concat("model", Value(" "), "key"), F("host__name")),
    Kind(Deployable, ("uuid", "rp_uuid"), (), F("name"), F("device__host__name")),
    Kind(AttachHandle, ("uuid",), ("attach_info",), F("attach_info"), F("deployable__device__host__name")),
    Kind(AcceleratorRequest, ("uuid", "instance_uuid"), (), F("uuid"), F("state")),
    Kind(DeviceProfile, ("uuid",), ("name",), F("name"), Value("")),
    Kind(Command, ("uuid",), (), Concat("op", Value(" "), "device_name"), F("host__name")),
)


def find(request: HttpRequest) -> HttpResponse:
    """Redirect to the page of the only result, or of the only exact one; otherwise show the results by kind."""
    term = request.GET.get("q", "").strip().replace("\0", "")[:LONGEST]
    hits = list(_hits(request, term)) if term else []
    exact = [hit for hit in hits if hit["exact"]]
    if len(exact) == 1 or len(hits) == 1:
        return HttpResponseRedirect((exact or hits)[0]["url"])
    groups = [(title, list(found)) for title, found in groupby(hits, key=lambda hit: hit["title"])]
    context = admin.site.each_context(request) | {
        "title": f"Search for “{term}”" if term else "Search",
        "term": term,
        "groups": [
            {"title": title, "hits": found[:EACH], "more": len(found) > EACH, "all": found[0]["all"]}
            for title, found in groups
        ],
    }
    return TemplateResponse(request, "console/find.html", context)


def _hits(request: HttpRequest, term: str) -> Iterator[dict[str, Any]]:
    """Yield the results of all kinds, in the order of `KINDS`, exact ones first. One statement."""
    asked = [
        (kind, rows)
        for kind in KINDS
        if request.user.has_perm(f"accelerators.view_{kind.name}")
        and (rows := _rows(kind, term, admin.site._registry[kind.model].get_queryset(request))) is not None
    ]
    if not asked:
        return
    (_, first), *others = asked
    rows = first.union(*(rows for _, rows in others), all=True) if others else first
    kinds = {kind.name: kind for kind, _ in asked}
    for name, key, shown, beside, exact in sorted(
        rows, key=lambda row: (list(kinds).index(row[0]), not row[4], row[2])
    ):
        listed = reverse(f"admin:accelerators_{name}_changelist")
        yield {
            "title": str(kinds[name].model._meta.verbose_name_plural),
            "url": reverse(f"admin:accelerators_{name}_change", args=[quote(str(key))]),
            "shown": badges.handle(shown) if name == "attachhandle" else shown,
            "beside": beside,
            "exact": exact,
            "all": f"{listed}?{urlencode({'q': term})}",
        }


def _rows(kind: Kind, term: str, rows: QuerySet[Any]) -> QuerySet[Any, tuple[Any, ...]] | None:
    """Return the query for the rows that match, at most `EACH` and one more; None if the term cannot match this
    kind.
    """
    exact, begins = [], []
    if bounds := uuid_bounds(term):
        begins += [Q(**{f"{field}__range": bounds}) for field in kind.uuids]
        exact += [Q(**{field: bounds[0]}) for field in kind.uuids if bounds[0] == bounds[1]]
    for field in kind.names:
        for word in _words(field, term):
            begins.append(Q(**{f"{field}__startswith": word}))
            exact.append(Q(**{field: word}))
    if not begins:
        return None
    whole = Case(When(reduce(or_, exact), then=True), default=False) if exact else Value(False)
    text = CharField()
    return (
        rows.filter(reduce(or_, begins))
        .order_by()
        .values_list(
            Value(kind.name, text),
            "pk",
            Cast(kind.shown, text),
            Cast(kind.beside, text),
            Cast(whole, BooleanField()),
        )[: EACH + 1]
    )


def uuid_bounds(term: str) -> tuple[UUID, UUID] | None:
    """Return the first and the last uuid that begin with `term`, the same uuid twice if it is complete, or None if
    it cannot be a uuid.
    """
    digits = term.lower().replace("-", "")
    if not LEAST_HEX <= len(digits) <= 32 or not re.fullmatch("[0-9a-f]+", digits):
        return None
    return UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))


def _words(field: str, term: str) -> list[str]:
    """Return the prefixes to search for in this field; PCI addresses and serial numbers in the form in which they
    are stored.
    """
    address = ADDRESS.fullmatch(term)
    if field == "address":
        return [_address(address)] if address else []
    if field == "attach_info":
        domain, bus, device, function = address.groups() if address else (None,) * 4
        names = {"bus": bus, "device": device, "domain": domain or "0000", "function": function}
        text = ", ".join(f'"{name}": "{str(value).lower()}"' for name, value in names.items())
        return ["{" + text + "}"] if function else []
    if field == "key":
        return [] if address else [term, f"serial:{term}"]
    return [term]


def _address(found: re.Match[str]) -> str:
    domain, bus, device, function = found.groups()
    end = f".{function}" if function else ""
    return f"{domain or '0000'}:{bus}:{device}{end}".lower()
