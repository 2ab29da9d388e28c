"""Django application of the console: registers what it adds to other packages, and prepares the database with each
`migrate`."""

import logging
from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate, pre_migrate

log = logging.getLogger(__name__)

DEVELOPMENT_MIGRATION = ("accelerators", "0002_events")
"""A migration of the versions before the first release. No release has it."""


class CyborgwebConfig(AppConfig):
    """The Django application `cyborgweb`; `verbose_name` is the heading of its models in the console."""

    name = "cyborgweb"
    verbose_name = "Access"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register deployment checks, the handlers of `migrate`, jobs, and functions of the console.

        It is the last of the applications, so garbage collection is resumed when this is done.
        """
        from django_q.signals import post_execute_in_worker

        from accelerators.runtime.jobs import JOBS, Job
        from accelerators.ui.extensions import (
            DENIAL_REASON,
            FIELD_SENTENCE,
            LIST_MEMORY,
            PAGE_SECTIONS,
            SAVED_VIEW,
            USER_PROJECT,
        )
        from agents.authentication import CONDUCTOR_ADDRESS
        from cyborgweb.auth import keystone, roles
        from cyborgweb.manual.fields import field_sentence
        from cyborgweb.notify import owners  # noqa: F401  (connects its signals)
        from cyborgweb.pages import load
        from cyborgweb.pages.saved_views import load_list_memory, select_rows_of_saved_view
        from cyborgweb.server import deploy_checks  # noqa: F401  (registers its checks)
        from cyborgweb.server.garbage import resume_after_loading
        from cyborgweb.server.tls import choose_agent_address
        from placement_sync.cloud import SERVICE_SESSION

        post_execute_in_worker.connect(_record_counts)
        pre_migrate.connect(_refuse_development_database, sender=self)
        post_migrate.connect(_create_role_groups, sender=self)
        JOBS.register("messages", Job("cyborgweb.notify.fanout.run", periodic=True))
        JOBS.register("deliveries", Job("cyborgweb.notify.sender.run", periodic=True))
        JOBS.register("owners", Job("cyborgweb.notify.owners.run", periodic=True))
        JOBS.register("mails", Job("cyborgweb.notify.sender.run_mails", periodic=True))
        PAGE_SECTIONS.register("host.load", load.build_host_load)
        PAGE_SECTIONS.register("device.load", load.build_device_load)
        DENIAL_REASON.register("roles", roles.explain_refusal)
        USER_PROJECT.register("roles", roles.get_only_project)
        LIST_MEMORY.register("saved_views", load_list_memory)
        SAVED_VIEW.register("saved_views", select_rows_of_saved_view)
        FIELD_SENTENCE.register("manual", field_sentence)
        SERVICE_SESSION.register("keystone", keystone.service_session)
        CONDUCTOR_ADDRESS.register("tls", choose_agent_address)
        resume_after_loading()


def _record_counts(**signal_arguments: Any) -> None:
    """Record, after each task of a worker, what it has counted: slow neighbours, and binds that were refused."""
    from cyborgweb.monitoring.event_recorder import record_counts

    record_counts()


def _refuse_development_database(using: str, **about: Any) -> None:
    """Raise CommandError if the database was made by a version from before the first release.

    Called before `migrate` changes the database with the alias `using`.
    """
    from django.core.management.base import CommandError
    from django.db import connections
    from django.db.migrations.recorder import MigrationRecorder

    if DEVELOPMENT_MIGRATION in MigrationRecorder(connections[using]).applied_migrations():
        raise CommandError(
            "This database was made by a version from before the first release and cannot be upgraded: "
            "start with an empty database, or keep using the version that made it."
        )


def _create_role_groups(**signal_arguments: Any) -> None:
    """After `migrate`, create the groups of the console's roles that do not exist, and set the permissions of all.

    Does nothing while the migrations applied so far do not include the application `auth`, and when Django sends the
    signal because a test has emptied the tables.
    """
    from cyborgweb.auth import roles

    if "plan" in signal_arguments and "auth" in signal_arguments["apps"].app_configs:
        for role in roles.ROLES:
            roles.get_group(role.group)
