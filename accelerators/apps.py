"""Django app configuration. It also declares the periodic jobs of this app."""

from typing import Any

from django.apps import AppConfig
from django.db import connection
from django.db.models.signals import post_migrate


class AcceleratorsConfig(AppConfig):
    name = "accelerators"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from accelerators.runtime import jobs

        post_migrate.connect(_migrated, sender=self)
        jobs.register("sweep", "accelerators.workflows.sweep.run", cluster="work")
        jobs.register("seals", "accelerators.audit.retention.run", cluster="work")
        jobs.register("deadlines", "accelerators.requests.binding.run_deadlines", cluster="work", timely=True)
        jobs.register("commands", "accelerators.workflows.command_results.run", cluster="work", timely=True)
        jobs.register("images", "accelerators.images.download.run", cluster="work", timely=True)
        jobs.register("drains", "accelerators.devices.lifecycle.run_drains", cluster="work", timely=True)
        jobs.register("bulks", "accelerators.workflows.bulk_actions.run", cluster="work", timely=True)
        jobs.register("rollouts", "accelerators.workflows.driver_rollouts.run", cluster="work", timely=True)


def _migrated(**about: Any) -> None:
    """After `migrate`, continue the transaction numbers of events above the highest stored one.

    A restored dump needs this, because the new database cluster numbers its transactions from a lower value on.
    """
    if "plan" in about and about.get("using") == connection.alias:  # `flush` in tests sends this signal without a plan
        with connection.cursor() as cursor:
            cursor.execute("SELECT to_regproc('accelerators_event_renumber') IS NOT NULL")
            if cursor.fetchone()[0]:
                cursor.execute("SELECT accelerators_event_renumber()")
