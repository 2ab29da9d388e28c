"""The search page `/admin/find/?q=…`: finds uuids by their first digits, PCI addresses, hosts, instances, serial
numbers and profiles.

A search is one statement that uses indexes only, is limited for each kind, and covers only kinds that the user may
view. A single result opens its page; several are listed by kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from itertools import groupby
from operator import or_
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.db.models import BooleanField, Case, CharField, Q, QuerySet, Value, When
from django.db.models.functions import Cast
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from accelerators.domain.uuids import uuid_bounds
from accelerators.ui.extensions import SEARCH_PROVIDERS

MAX_HITS_PER_KIND = 20
"""Results that are listed for each kind."""
MAX_TERM_LENGTH = 255
PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{4}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7])?)?", re.IGNORECASE)


def show_search(request: HttpRequest) -> HttpResponse:
    """Search for the parameter `q`. Redirect to the page of the only result, or of the only exact one; otherwise show
    the results by kind, at most MAX_HITS_PER_KIND of each. Without a term show only the form.
    """
    term = request.GET.get("q", "").strip().replace("\0", "")[:MAX_TERM_LENGTH]
    hits = list(_iterate_hits(request, term)) if term else []
    exact_hits = [hit for hit in hits if hit["exact"]]
    if len(exact_hits) == 1 or len(hits) == 1:
        return HttpResponseRedirect((exact_hits or hits)[0]["url"])
    groups = [(title, list(found)) for title, found in groupby(hits, key=lambda hit: hit["title"])]
    context = admin.site.each_context(request) | {
        "title": f"Search for “{term}”" if term else "Search",
        "term": term,
        "groups": [
            {
                "title": title,
                "hits": found[:MAX_HITS_PER_KIND],
                "more": len(found) > MAX_HITS_PER_KIND,
                "all": found[0]["all"],
            }
            for title, found in groups
        ],
    }
    return TemplateResponse(request, "cyborgweb/pages/search_results.html", context)


def _iterate_hits(request: HttpRequest, term: str) -> Iterator[dict[str, Any]]:
    """Yield the results of all kinds that the user may view, in the order of `SEARCH_PROVIDERS`, the exact ones of each
    kind first, as dicts for the template.

    At most MAX_HITS_PER_KIND + 1 results of each kind are yielded; the last shows that there are more. Costs one
    statement, or none if the term can match no kind.
    """
    queries = {
        name: rows
        for name, provider in SEARCH_PROVIDERS.items()
        if request.user.has_perm(name.replace(".", ".view_"))
        and (rows := _build_query(name, term, admin.site._registry[provider.model].get_queryset(request))) is not None
    }
    if not queries:
        return
    first, *others = queries.values()
    rows = first.union(*others, all=True) if others else first
    order = list(queries)
    for name, key, text, beside, exact in sorted(rows, key=lambda row: (order.index(row[0]), not row[4], row[2])):
        provider = SEARCH_PROVIDERS[name]
        page = f"admin:{name.replace('.', '_')}"
        yield {
            "title": str(provider.model._meta.verbose_name_plural),
            "url": reverse(f"{page}_change", args=[quote(str(key))]),
            "shown": provider.describe(text),
            "beside": beside,
            "exact": exact,
            "all": f"{reverse(f'{page}_changelist')}?{urlencode({'q': term})}",
        }


def _build_query(name: str, term: str, rows: QuerySet[Any]) -> QuerySet[Any, tuple[Any, ...]] | None:
    """Return the query for those of `rows` that match the term, at most MAX_HITS_PER_KIND + 1; None if the term cannot
    match the kind `name`. Nothing is queried here.

    The columns are the kind, the key, the text, the side text, and whether the match is exact.
    """
    provider = SEARCH_PROVIDERS[name]
    exact_conditions, prefix_conditions = [], []
    if bounds := uuid_bounds(term):
        prefix_conditions += [Q(**{f"{field}__range": bounds}) for field in provider.uuid_fields]
        exact_conditions += [Q(**{field: bounds[0]}) for field in provider.uuid_fields if bounds[0] == bounds[1]]
    for field in provider.name_fields:
        for word in _search_prefixes(field, term):
            prefix_conditions.append(Q(**{f"{field}__startswith": word}))
            exact_conditions.append(Q(**{field: word}))
    if not prefix_conditions:
        return None
    is_exact = Case(When(reduce(or_, exact_conditions), then=True), default=False) if exact_conditions else Value(False)
    text = CharField()
    return (
        rows.filter(reduce(or_, prefix_conditions))
        .order_by()
        .values_list(
            Value(name, text),
            "pk",
            Cast(provider.result_text, text),
            Cast(provider.side_text, text),
            Cast(is_exact, BooleanField()),
        )[: MAX_HITS_PER_KIND + 1]
    )


def _search_prefixes(field: str, term: str) -> list[str]:
    """Return the prefixes to search for in this field, in the form in which the field stores them; an empty list if the
    term cannot match. `address` and `attach_info` hold PCI addresses, `key` also serial numbers.
    """
    address = PCI_ADDRESS.fullmatch(term)
    if field == "address":
        return [_format_pci_address(address)] if address else []
    if field == "attach_info":
        domain, bus, device, function = address.groups() if address else (None,) * 4
        names = {"bus": bus, "device": device, "domain": domain or "0000", "function": function}
        text = ", ".join(f'"{name}": "{str(value).lower()}"' for name, value in names.items())
        return ["{" + text + "}"] if function else []
    if field == "key":
        return [] if address else [term, f"serial:{term}"]
    return [term]


def _format_pci_address(match: re.Match[str]) -> str:
    """Return the address in lower case, with the domain `0000` if it has none, and with the function only if it has
    one.
    """
    domain, bus, device, function = match.groups()
    end = f".{function}" if function else ""
    return f"{domain or '0000'}:{bus}:{device}{end}".lower()
