"""`manage.py api_token NAME`: create a token for the header `X-Auth-Token`, and print it once."""

from __future__ import annotations

import argparse
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.management import shell
from cyborgweb.auth.policy import list_roles_with_implied
from cyborgweb.auth.policy_rules import AUDITOR, OPERATOR
from cyborgweb.models import ApiToken

ROLES = ("admin", "manager", OPERATOR, AUDITOR, "member", "reader", "service")
"""The roles that `--role` accepts. A token also gets those that its role implies."""


class Command(BaseCommand):
    """Create an API token."""

    help = "Create an API token. The last line printed is the token; it is shown once and stored only as a hash."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the token's name, role and project."""
        parser.add_argument("name", help="purpose of the token, which the console shows")
        parser.add_argument(
            "--role",
            default="admin",
            choices=ROLES,
            help="role of the token (default: admin); auditor reads the rows of every project and changes none",
        )
        parser.add_argument(
            "--project", default="local", help="id of the project to which the token is scoped (default: local)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Create a token, record an event, and print the token as the last line.

        The token belongs to the user `token-NAME`, who is created without a password if there is none. Another token of
        the same name is not touched. Raises CommandError if NAME is empty or longer than 150 characters.
        """
        name, role = options["name"], options["role"]
        if not 0 < len(name) <= 150:
            raise CommandError("NAME must have 1 to 150 characters")
        users = get_user_model()
        user, is_new_user = users.objects.get_or_create(username=f"token-{name}"[:150])
        if is_new_user:
            user.set_unusable_password()
            user.save()
        roles = list_roles_with_implied(role)
        secret = ApiToken.create_with_secret(name, user, roles, options["project"])
        changes = {"roles": [None, roles], "project": [None, options["project"]]}
        conductor.record_event(
            "token.created", EventSource.PERSON, shell.current_operator().name, subject=(None, name), changes=changes
        )
        self.stdout.write(f"Token {name!r} with the roles {', '.join(roles)} in project {options['project']!r}:")
        self.stdout.write(secret)
