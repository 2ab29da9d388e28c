"""The meaning of each field in one sentence, from the model's help text or `docs/fields.toml`, and the manual's page
that lists them.

The manual, the console's forms and `cyborgweb.api.openapi` use the same sentence. The sentences are in a file and not
in the models, where each change of a word would need a migration.
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
"""The table of fields that mean the same for every kind."""
ALIASES = {
    "driver": "hostdriver",
    "handle": "attachhandle",
    "offered": "service",
    "profile": "deviceprofile",
    "request": "acceleratorrequest",
    "rule": "admissionrule",
}
"""The API's names of kinds → the names of the models."""
HEAD = """\
# Every field

These are the fields of the console's lists and forms; the API has them under the same names. *Generated from the code.*
"""


@cache
def table() -> dict[str, dict[str, str]]:
    """Return `docs/fields.toml`: kind → field → sentence."""
    return tomllib.loads((DOCS / "fields.toml").read_text())


def sentence(kind: str, name: str, own: str = "") -> str:
    """Return the sentence for a field of a kind (`device`, `agent`), '' if there is none. The kind's own table comes
    first, then `own` (the text in the code), then the table for all kinds.
    """
    known = table()
    return known.get(kind, {}).get(name) or own or known[ANY].get(name, "")


def of_api(component: str, name: str) -> str:
    """Return the sentence for a property of one of the API's schemas, '' if there is none."""
    kind = component.removeprefix("Patched")
    for end in ("Reference", "Request", "WithTimeline", "WithSteps"):
        kind = kind.removesuffix(end) or kind
    return sentence(ALIASES.get(kind.lower(), kind.lower()), name)


def shown(site_admin: Any) -> Iterator[tuple[str, str, str]]:
    """Yield every field of one kind in the console: its name, its heading, its sentence. Of fields with the same
    heading only the first is yielded.
    """
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
    """Yield every list of the console with its admin: first those in the navigation, in its order, then the others."""
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
    """Return the page as Markdown."""
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
