"""Records an event for each change that is made in the console to users, groups and API tokens.

Django's admin calls these methods in the transaction of the change. Events contain no secrets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from django.db.models import Model
from django.http import HttpRequest

from accelerators import conductor
from accelerators.domain.states import EventSource

PASSWORD_FIELD = "password"


class AuditedAdminMixin:
    """A mixin for a ModelAdmin: records an event `<kind>.created`, `.changed` or `.deleted` for each change.

    The ModelAdmin must set `kind`, the word for its objects in events, such as `user`.
    """

    kind: ClassVar[str]

    def construct_change_message(self, request: HttpRequest, form: Any, formsets: Any, add: bool = False) -> Any:
        """Record an event with the old and new values of the changed fields, then return Django's message.

        The old values of a new object are None. About a password, the event only says that there is another one.
        """
        changes = {
            name: [
                None if add else _to_event_value(form.initial.get(name)),
                _to_event_value(form.cleaned_data.get(name)),
            ]
            for name in form.changed_data
            if PASSWORD_FIELD not in name
        }
        if any(PASSWORD_FIELD in name for name in form.changed_data):
            changes[PASSWORD_FIELD] = [None, "another one"]
        changed_object = form.instance if hasattr(form, "instance") else form.user
        self._record_event(request, "created" if add else "changed", changed_object, changes)
        return super().construct_change_message(request, form, formsets, add)  # type: ignore[misc]

    def log_deletions(self, request: HttpRequest, queryset: Iterable[Model]) -> Any:
        """Record an event for each deleted object, then let Django log the deletions."""
        for deleted_object in queryset:
            self._record_event(request, "deleted", deleted_object, {"name": [str(deleted_object), None]})
        return super().log_deletions(request, queryset)  # type: ignore[misc]

    def _record_event(self, request: HttpRequest, verb: str, changed_object: Model, changes: dict[str, Any]) -> None:
        """Record the event `<kind>.<verb>` of the console's user, in the transaction of the change."""
        user: Any = request.user
        subject = (None, str(changed_object))
        conductor.record_event(
            f"{self.kind}.{verb}", EventSource.PERSON, user.get_username(), subject=subject, changes=changes
        )


def _to_event_value(value: Any) -> Any:
    """Return the value as it is stored in an event: None, bool, int and str unchanged, a collection as a sorted list of
    names, and any other object by its name.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return sorted(map(str, value)) if isinstance(value, Iterable) else str(value)
