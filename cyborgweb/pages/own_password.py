"""The page on which people change their own password."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse

from accelerators import conductor
from accelerators.domain.states import EventSource


def change_own_password(request: HttpRequest) -> HttpResponse:
    """Show Django's form or, on POST, change the password. A change records an event in the same transaction."""
    user: Any = request.user
    before = user.password
    with conductor.writing():
        response: HttpResponse = admin.site.password_change(request)
        if user.password != before:
            name = user.get_username()
            changes = {"password": [None, "another one"]}
            conductor.record_event("user.changed", EventSource.PERSON, name, subject=(None, name), changes=changes)
    return response
