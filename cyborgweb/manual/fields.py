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

from cyborgweb.manual.contents import DOCS_FOLDER

ANY_KIND = "*"
"""The table of fields that mean the same for every kind."""
MODEL_BY_API_KIND = {
    "driver": "hostdriver",
    "handle": "attachhandle",
    "backendservice": "service",
    "profile": "deviceprofile",
    "request": "acceleratorrequest",
    "rule": "admissionrule",
}
"""The API's names of kinds → the names of the models."""
PAGE_HEAD = """\
# Every field

These are the fields of the console's lists and forms; the API has them under the same names. *Generated from the code.*
"""


@cache
def load_sentences() -> dict[str, dict[str, str]]:
    """Return `docs/fields.toml`: kind → field → sentence. The file is read once per process."""
    return tomllib.loads((DOCS_FOLDER / "fields.toml").read_text())


def field_sentence(kind: str, name: str, code_text: str = "") -> str:
    """Return the sentence for the field `name` of a kind (the model's name, such as `device`), '' if there is none.

    The sentence in the kind's own table of `docs/fields.toml` takes precedence, then `code_text` (the model's help
    text), then the sentence in the table for all kinds.
    """
    sentences = load_sentences()
    return sentences.get(kind, {}).get(name) or code_text or sentences[ANY_KIND].get(name, "")


def api_field_sentence(component: str, name: str) -> str:
    """Return the sentence for the property `name` of the API's schema `component` (such as `PatchedDeviceRequest`), ''
    if there is none.
    """
    kind = component.removeprefix("Patched")
    for end in ("Reference", "Request", "WithTimeline", "WithSteps", "Change"):
        kind = kind.removesuffix(end) or kind
    return field_sentence(MODEL_BY_API_KIND.get(kind.lower(), kind.lower()), name)


def iterate_console_fields(site_admin: Any) -> Iterator[tuple[str, str, str]]:
    """Yield every field in the list and the form of one ModelAdmin: its name, its heading, and its sentence, '' if
    there is none. Of fields with the same heading only the first is yielded.
    """
    model: type[Model] = site_admin.model
    fields_by_name = {field.name: field for field in model._meta.get_fields()}
    names = [*site_admin.list_display, *(site_admin.fields or ()), *site_admin.readonly_fields]
    names += flatten_fieldsets(site_admin.fieldsets or ())
    headings = set()
    for name in dict.fromkeys(name for name in names if isinstance(name, str) and name != "__str__"):
        public_name = name.removeprefix("shown_").removeprefix("all_")
        if (heading := _field_heading(site_admin, name)) not in headings:
            headings.add(heading)
            code_text = str(getattr(fields_by_name.get(public_name), "help_text", ""))
            yield public_name, heading, field_sentence(model._meta.model_name or "", public_name, code_text)


def iterate_lists() -> Iterator[tuple[str, Any]]:
    """Yield the title and the ModelAdmin of every list of the console: first those in the sidebar, in its order, then
    the others.
    """
    from cyborgweb.pages.navigation import SIDEBAR_GROUPS

    registry = admin.site._registry
    title_by_model = {model: word for _, entries in SIDEBAR_GROUPS for word, _, model in entries}
    for name, word in title_by_model.items():
        if (model := apps.get_model(name)) in registry:
            yield word, registry[model]
    for model, model_admin in registry.items():
        if model._meta.label_lower not in title_by_model:
            yield str(model._meta.verbose_name_plural).capitalize(), model_admin


def render_fields_page() -> str:
    """Return the manual's page of all fields as Markdown: one table for each list of the console."""
    lines = [PAGE_HEAD]
    for word, model_admin in iterate_lists():
        lines += [f"## {word}\n", "| field | meaning |", "|---|---|"]
        lines += [f"| {heading} | {said} |" for _, heading, said in iterate_console_fields(model_admin)]
        lines.append("")
    return "\n".join(lines)


def _field_heading(site_admin: Any, name: str) -> str:
    """Return the heading of a column or field as the console shows it. Raises FieldDoesNotExist if neither the admin
    nor the model has the name.
    """
    attribute = getattr(site_admin, name, None) or getattr(site_admin.model, name, None)
    short_description = getattr(attribute, "short_description", None)
    text = str(short_description or site_admin.opts.get_field(name).verbose_name)
    return text[:1].upper() + text[1:]
