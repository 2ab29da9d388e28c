"""The session engine (SESSION_ENGINE): Django's sessions in the database, which expire by the database's clock.

Any web process may read a session that another one has stored, and the clocks of their machines may differ.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from django.contrib.sessions.backends.db import SessionStore as DjangoSessionStore
from django.contrib.sessions.models import Session
from django.core.exceptions import SuspiciousOperation
from django.db.models.functions import Now

from accelerators.runtime import database_clock


class SessionStore(DjangoSessionStore):
    """A session in the database. Its times are those of the database's clock. Only its synchronous methods are used."""

    def _get_session_from_db(self) -> Session | None:
        """Return the row of the session; None if there is none or it has expired, and then forget its key."""
        try:
            return Session.objects.get(session_key=self.session_key, expire_date__gt=Now())
        except (Session.DoesNotExist, SuspiciousOperation) as error:
            if isinstance(error, SuspiciousOperation):
                logging.getLogger(f"django.security.{type(error).__name__}").warning("%s", error)
            self._session_key = None
            return None

    def get_expiry_age(self, **options: Any) -> int:
        """Return the seconds until the session expires."""
        return super().get_expiry_age(**{"modification": database_clock.now()} | options)

    def get_expiry_date(self, **options: Any) -> datetime:
        """Return when the session expires, if it is stored now."""
        return super().get_expiry_date(**{"modification": database_clock.now()} | options)

    @classmethod
    def clear_expired(cls) -> None:
        """Delete the sessions that have expired."""
        cls.get_model_class().objects.filter(expire_date__lt=Now()).delete()
