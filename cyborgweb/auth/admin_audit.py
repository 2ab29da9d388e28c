"""Records an event for each change that is made in the console to users, groups and API tokens.

Django's admin calls these methods in the transaction of the change. Events contain no secrets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from django.db.models import Model
from django.http import HttpRequest

from accelerators import conductor
from accelerators.domain.states import Source

SECRET = "password"


class Recorded:
    """A mixin for a ModelAdmin: records an event `<kind>.created`, `.changed` or `.deleted` for each change."""

    kind: ClassVar[str]

    def construct_change_message(self, request: HttpRequest, form: Any, formsets: Any, add: bool = False) -> Any:
        """Record an event with the old and new values of the changed fields, then return Django's message.

        Of a password, the event only says that there is another one.
        """
        changes = {
            name: [None if add else _shown(form.initial.get(name)), _shown(form.cleaned_data.get(name))]
            for name in form.changed_data
            if SECRET not in name
        }
        if any(SECRET in name for name in form.changed_data):
            changes[SECRET] = [None, "another one"]
        about = form.instance if hasattr(form, "instance") else form.user
        self._record(request, "created" if add else "changed", about, changes)
        return super().construct_change_message(request, form, formsets, add)  # type: ignore[misc]

    def log_deletions(self, request: HttpRequest, queryset: Iterable[Model]) -> Any:
        """Record an event for each deleted object, then let Django log the deletions."""
        for one in queryset:
            self._record(request, "deleted", one, {"name": [str(one), None]})
        return super().log_deletions(request, queryset)  # type: ignore[misc]

    def _record(self, request: HttpRequest, verb: str, about: Model, changes: dict[str, Any]) -> None:
        who: Any = request.user
        subject = (None, str(about))
        conductor.record(f"{self.kind}.{verb}", Source.PERSON, who.get_username(), subject=subject, changes=changes)


def _shown(value: Any) -> Any:
    """Return the value as it is stored in an event: objects by their names, collections as sorted lists."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return sorted(map(str, value)) if isinstance(value, Iterable) else str(value)
