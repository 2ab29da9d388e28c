"""What each field is, in one sentence: a model's own help text, or `docs/fields.toml`. The manual's page of them.

The manual, the console's forms and `cyborgweb.api.openapi` say the same sentence. It stands in a file and not in the
models where a migration would be needed for a word.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.contrib.admin.utils import flatten_fieldsets
from django.db.models import Model

from cyborgweb.manual.contents import DOCS

ANY = "*"
"""The table of what means the same wherever it stands."""
ALIASES = {
    "driver": "hostdriver",
    "handle": "attachhandle",
    "offered": "service",
    "profile": "deviceprofile",
    "request": "acceleratorrequest",
    "rule": "admissionrule",
}
"""Kinds that the API calls otherwise than the models do."""
HEAD = """\
# Every field

What stands in the console's lists and forms, and in the API under the same names. *Generated from the code.*
"""


@cache
def table() -> dict[str, dict[str, str]]:
    """`docs/fields.toml`: kind → field → sentence."""
    return tomllib.loads((DOCS / "fields.toml").read_text())


def sentence(kind: str, name: str, own: str = "") -> str:
    """Of a field of a kind (`device`, `agent`); `own` is what the code says of it; '' when nobody says anything."""
    known = table()
    return known.get(kind, {}).get(name) or own or known[ANY].get(name, "")


def of_api(component: str, name: str) -> str:
    """Of a property of one of the API's schemas."""
    kind = component.removeprefix("Patched")
    for end in ("Reference", "Request", "WithTimeline", "WithSteps"):
        kind = kind.removesuffix(end) or kind
    return sentence(ALIASES.get(kind.lower(), kind.lower()), name)


def shown(site_admin: Any) -> Iterator[tuple[str, str, str]]:
    """Every field of one kind of thing in the console: its name, what stands above it, its sentence."""
    model: type[Model] = site_admin.model
    known = {field.name: field for field in model._meta.get_fields()}
    names = [*site_admin.list_display, *(site_admin.fields or ()), *site_admin.readonly_fields]
    names += flatten_fieldsets(site_admin.fieldsets or ())
    headings = set()
    for name in dict.fromkeys(name for name in names if isinstance(name, str) and name != "__str__"):
        public = name.removeprefix("shown_").removeprefix("all_")
        if (heading := _heading(site_admin, name)) not in headings:
            headings.add(heading)
            own = str(getattr(known.get(public), "help_text", ""))
            yield public, heading, sentence(model._meta.model_name or "", public, own)


def kinds() -> Iterator[tuple[str, Any]]:
    """Every list of the console in the order of its navigation: its word, its admin."""
    from cyborgweb.pages.navigation import GROUPS

    registry = admin.site._registry
    words = {model: word for _, entries in GROUPS for word, _, model in entries}
    for name, word in words.items():
        if (model := apps.get_model(name)) in registry:
            yield word, registry[model]
    for model, one in registry.items():
        if model._meta.label_lower not in words:
            yield str(model._meta.verbose_name_plural).capitalize(), one


def markdown() -> str:
    """The page."""
    lines = [HEAD]
    for word, one in kinds():
        lines += [f"## {word}\n", "| field | meaning |", "|---|---|"]
        lines += [f"| {heading} | {said} |" for _, heading, said in shown(one)]
        lines.append("")
    return "\n".join(lines)


def _heading(site_admin: Any, name: str) -> str:
    found = getattr(site_admin, name, None) or getattr(site_admin.model, name, None)
    said = getattr(found, "short_description", None)
    text = str(said or site_admin.opts.get_field(name).verbose_name)
    return text[:1].upper() + text[1:]
