"""The search page `/admin/find/?q=…`: finds uuids by their first digits, PCI addresses, hosts, instances, serial
numbers, profiles, and devices by the names of their hardware.

A search is one statement, which is limited for each kind and covers only kinds that the user may view. It uses indexes
only, unless the term is the name of hardware. One more statement reads which hardware there is, unless the term is
hexadecimal or too short for a name. A single result opens its page; several are listed by kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import groupby
from operator import or_
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.db.models import BooleanField, Case, CharField, QuerySet, Value, When
from django.db.models.functions import Cast
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html

from accelerators.ui.extensions import SEARCH_PROVIDERS
from accelerators.ui.search import BEGINNING_MARK, build_word_conditions

MAX_HITS_PER_KIND = 20
"""Results that are listed for each kind."""
MAX_TERM_LENGTH = 255


def show_search(request: HttpRequest) -> HttpResponse:
    """Search for the parameter `q`. Redirect to the page of the only result, or of the only exact one, with a
    message that leads to the others; otherwise show the results by kind, at most MAX_HITS_PER_KIND of each. A term that
    ends in `*` has no exact results. Without a term show only the form.
    """
    term = request.GET.get("q", "").strip().replace("\0", "")[:MAX_TERM_LENGTH]
    hits = list(_iterate_hits(request, term)) if term.removesuffix(BEGINNING_MARK) else []
    exact_hits = [hit for hit in hits if hit["exact"]]
    if len(exact_hits) == 1 or len(hits) == 1:
        if len(hits) > 1:
            url = f"{reverse('find')}?{urlencode({'q': f'{term}{BEGINNING_MARK}'})}"
            text = 'This is exactly “{}”. <a href="{}">Show also what begins with it</a>.'
            messages.info(request, format_html(text, term, url))
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
    statement, or none if the term can match no kind, and those of `find_by_name`.
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
    match the kind `name`. Costs no statement, except that of the kind's `find_by_name`.

    The columns are the kind, the key, the text, the side text, and whether the match is exact.
    """
    provider = SEARCH_PROVIDERS[name]
    exact, conditions = build_word_conditions(provider.fields, term)
    if by_name := provider.find_by_name(term.removesuffix(BEGINNING_MARK)):
        conditions.append(by_name)
    if not conditions:
        return None
    is_exact = Case(When(reduce(or_, exact), then=True), default=False) if exact else Value(False)
    text = CharField()
    return (
        rows.filter(reduce(or_, conditions))
        .order_by()
        .values_list(
            Value(name, text),
            "pk",
            Cast(provider.result_text, text),
            Cast(provider.side_text, text),
            Cast(is_exact, BooleanField()),
        )[: MAX_HITS_PER_KIND + 1]
    )
