"""How console forms show a refused change."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponseRedirect
from django.http.response import HttpResponseBase
from unfold.admin import ModelAdmin

from accelerators.domain.errors import RefusedError


class RefusalAsMessage(ModelAdmin):
    """Base class of forms whose change the conductor may refuse, for example after a change by somebody else."""

    def changeform_view(self, request: HttpRequest, *args: Any, **options: Any) -> HttpResponseBase:
        """Show or save the form. A refusal becomes an error message on the same page."""
        try:
            return super().changeform_view(request, *args, **options)
        except RefusedError as refused:
            messages.error(request, refused.text)
            return HttpResponseRedirect(request.get_full_path())
