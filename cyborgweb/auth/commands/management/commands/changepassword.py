"""`manage.py changepassword [USER]`: change the password of a local user, and record an event."""

from __future__ import annotations

import argparse
import getpass
from typing import Any

from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.management import shell

MAX_TRIES = 3


class Command(BaseCommand):
    """Change a password."""

    help = "Change the password of a user of the console. It is asked for twice, and not shown."
    requires_migrations_checks = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the user's name."""
        parser.add_argument("username", nargs="?", help="name of the user (default: the name of your own login)")

    def handle(self, *args: Any, **options: Any) -> str:
        """Ask for the new password, store it and record an event in one transaction, and return a sentence about it.

        Raises CommandError if there is no such user, or if no acceptable password was given.
        """
        username = options["username"] or getpass.getuser()
        user = User.objects.filter(username=username).first()
        if user is None:
            raise CommandError(f"user {username!r} does not exist")
        self.stdout.write(f"Changing password for user {username!r}")
        password = self._ask_password(user)
        with conductor.writing():
            user = User.objects.select_for_update().get(pk=user.pk)
            user.set_password(password)
            user.save(update_fields=["password"])
            conductor.record_event(
                "user.changed",
                EventSource.PERSON,
                shell.current_operator().name,
                subject=(None, user.get_username()),
                changes={"password": [None, "another one"]},
            )
        return f"Password changed successfully for user {username!r}"

    def _ask_password(self, user: User) -> str:
        """Ask for the new password until it is the same twice and acceptable, and return it. Raises CommandError if it
        is empty, and after MAX_TRIES tries.
        """
        for _ in range(MAX_TRIES):
            password, repeated = (getpass.getpass(prompt) for prompt in ("Password: ", "Password (again): "))
            if not password:
                raise CommandError("aborted")
            if password != repeated:
                self.stderr.write("Passwords do not match. Please try again.")
                continue
            try:
                validate_password(repeated, user)
            except ValidationError as error:
                self.stderr.write("\n".join(error.messages))
                continue
            return password
        raise CommandError(f"Aborting password change for user {user.get_username()!r} after {MAX_TRIES} attempts")
