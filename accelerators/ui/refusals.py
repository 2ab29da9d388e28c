"""Show refused changes in the forms of the console."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from unfold.admin import ModelAdmin

from accelerators.domain.errors import RefusedError
from accelerators.domain.generations import ChangedMeanwhileError

CHANGED_MEANWHILE_TEXT = (
    "Somebody else has changed this since the page was shown, so nothing was done. Look at the present version, then"
    " repeat your change if you still want it."
)
"""The console shows this text for a ChangedMeanwhileError, whose own text tells programs what to send."""


def describe_refusal(refused: RefusedError) -> str:
    """Return the reason of a refused change as the console shows it to people."""
    return CHANGED_MEANWHILE_TEXT if isinstance(refused, ChangedMeanwhileError) else refused.text


class RefusalAsMessage(ModelAdmin):
    """Base class of forms whose change the conductor may refuse (RefusedError), for example because of another change.

    Only the form is covered, not Django's pages and actions that delete.
    """

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show or save the form; if the change is refused, answer as `answer_refusal` does."""
        try:
            return super().changeform_view(request, object_id, form_url, extra_context)
        except RefusedError as refused:
            return self.answer_refusal(request, object_id, refused)

    def answer_refusal(self, request: HttpRequest, object_id: str | None, refused: RefusedError) -> HttpResponse:
        """Redirect to the same page, with the reason as a message; the entered values are lost."""
        messages.error(request, describe_refusal(refused))
        return HttpResponseRedirect(request.get_full_path())
