"""The console's page for a change that was refused because somebody else changed the same settings meanwhile.

It shows the present version and the user's own side by side. The user can apply the own version after all, which is
then based on the present one, or keep the present version.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import unquote
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import urlencode

from accelerators.domain.errors import RefusedError
from accelerators.domain.generations import ChangedMeanwhileError, NoGenerationError
from accelerators.models import Event
from accelerators.ui import badges
from accelerators.ui.refusals import RefusalAsMessage, describe_refusal

LEFT_OUT = ("csrfmiddlewaretoken", "generation")
"""Fields of the refused request that are not sent again when the user applies the own version."""
MAX_GENERATION_DIGITS = 18


@dataclass(frozen=True)
class ComparedSetting:
    """One setting with its present value and that of the user, both as texts."""

    label: str
    present: str
    mine: str

    @property
    def differs(self) -> bool:
        """Whether both values differ."""
        return self.present != self.mine


def read_generation(request: HttpRequest) -> int:
    """Return the generation with which the form was shown: a field of the form, or a parameter of its address.

    Raises NoGenerationError if the request has neither.
    """
    generation = find_generation(request)
    if generation is None:
        raise NoGenerationError("The form does not say which version it shows. Nothing was changed: load it again.")
    return generation


def find_generation(request: HttpRequest) -> int | None:
    """Return the generation of a form as `read_generation` does, or None if the request has neither."""
    text = request.POST.get("generation") or request.GET.get("generation", "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_GENERATION_DIGITS
    return int(text) if is_number else None


def render_conflict_page(
    request: HttpRequest,
    site: AdminSite,
    refused: ChangedMeanwhileError,
    subject: tuple[UUID, str],
    generation: int,
    settings: Iterable[ComparedSetting],
) -> HttpResponse:
    """Return the page that compares both versions: 409.

    `subject` is the uuid that the events of the settings have, and their name; `generation` is the present one.
    """
    event = Event.objects.filter(subject=subject[0]).first()
    context: Mapping[str, Any] = site.each_context(request) | {
        "title": f"Somebody else changed {subject[1]}",
        "name": subject[1],
        "refused": refused.text,
        "event": event,
        "when": badges.render_relative_time(event.at) if event else "",
        "settings": list(settings),
        "generation": generation,
        "fields": [
            (name, value) for name in request.POST if name not in LEFT_OUT for value in request.POST.getlist(name)
        ],
    }
    return TemplateResponse(request, "console/conflict.html", dict(context), status=409)


class ConflictPage(RefusalAsMessage):
    """Base class of forms of settings that have a generation. `save_model` and `delete_model` pass `read_generation`
    on; the conflict that `save_model` raises becomes a page."""

    change_form_before_template = "console/generation_input.html"

    def answer_refusal(self, request: HttpRequest, object_id: str | None, refused: RefusedError) -> HttpResponse:
        """Show both versions (409) if somebody else changed the row meanwhile; otherwise answer as the base class."""
        row: Any = self.get_object(request, object_id) if object_id else None
        if row is None or not isinstance(refused, ChangedMeanwhileError):
            return super().answer_refusal(request, object_id, refused)
        settings = self.compare_settings(request, row)
        return render_conflict_page(request, self.admin_site, refused, (row.uuid, str(row)), row.generation, settings)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Ask for a confirmation, or delete the row; the address of the form has the generation that it shows.

        If the deletion is refused, redirects to the page of the row with the reason, or to the list if it is gone.
        """
        row: Any = self.get_object(request, unquote(object_id))
        if row is not None and request.method == "GET" and "generation" not in request.GET:
            shown = request.GET.dict() | {"generation": row.generation}
            return HttpResponseRedirect(f"{request.path}?{urlencode(shown)}")
        try:
            return super().delete_view(request, object_id, extra_context)
        except RefusedError as refused:
            messages.error(request, describe_refusal(refused))
            names = f"admin:{self.opts.app_label}_{self.opts.model_name}"
            if self.get_queryset(request).filter(pk=row.pk).exists():
                return HttpResponseRedirect(reverse(f"{names}_change", args=[row.pk]))
            return HttpResponseRedirect(reverse(f"{names}_changelist"))

    def compare_settings(self, request: HttpRequest, row: Model) -> list[ComparedSetting]:
        """Return the settings that the form can change, with their present values and those of the refused request."""
        form = self.get_form(request, row, change=True)(request.POST, instance=copy.copy(row))
        form.full_clean()
        return [
            ComparedSetting(
                str(field.label or name).capitalize(),
                _describe_value(getattr(row, name)),
                _describe_value(form.cleaned_data.get(name)),
            )
            for name, field in form.fields.items()
        ]


def _describe_value(value: Any) -> str:
    """Return the value of a setting as a text for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
