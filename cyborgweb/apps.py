"""Django application of the console: registers jobs and checks, and prepares the database with each `migrate`."""

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate, pre_migrate

DEVELOPMENT_MIGRATION = ("accelerators", "0002_events")
"""A migration of the versions before the first release. No release has it."""


class CyborgwebConfig(AppConfig):
    name = "cyborgweb"
    verbose_name = "Access"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register deployment checks, the handlers of `migrate`, and the jobs of notifications."""
        from accelerators.runtime.jobs import JOBS, Job
        from cyborgweb.server import deploy_checks  # noqa: F401  (registers its checks)

        pre_migrate.connect(_refuse_development_database, sender=self)
        post_migrate.connect(_create_role_groups, sender=self)
        JOBS.register("messages", Job("cyborgweb.notify.fanout.run", periodic=True))
        JOBS.register("deliveries", Job("cyborgweb.notify.sender.run", periodic=True))
        JOBS.register("mails", Job("cyborgweb.notify.sender.run_mails", periodic=True))


def _refuse_development_database(using: str, **about: Any) -> None:
    """Raise CommandError before `migrate` changes a database that was made before the first release."""
    from django.core.management.base import CommandError
    from django.db import connections
    from django.db.migrations.recorder import MigrationRecorder

    if DEVELOPMENT_MIGRATION in MigrationRecorder(connections[using]).applied_migrations():
        raise CommandError(
            "This database was made by a version from before the first release and cannot be upgraded: "
            "start with an empty database, or keep using the version that made it."
        )


def _create_role_groups(**signal_arguments: Any) -> None:
    """Create the groups of the roles after `migrate`, and set their permissions.

    Does nothing while the migrations applied so far do not include the application `auth`.
    """
    from cyborgweb.auth import roles

    if (
        "plan" in signal_arguments and "auth" in signal_arguments["apps"].app_configs
    ):  # Django also sends it when tests empty tables
        for role in roles.ROLES:
            roles.get_group(role.group)
