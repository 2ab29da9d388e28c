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

        post_migrate.connect(_renumber_transactions, sender=self)
        jobs.register_job("sweep", "accelerators.workflows.sweep.run", cluster="work")
        jobs.register_job("seals", "accelerators.audit.retention.run", cluster="work")
        jobs.register_job("deadlines", "accelerators.requests.binding.run_deadlines", cluster="work", periodic=True)
        jobs.register_job("commands", "accelerators.workflows.command_results.run", cluster="work", periodic=True)
        jobs.register_job("images", "accelerators.images.download.run", cluster="work", periodic=True)
        jobs.register_job("drains", "accelerators.devices.lifecycle.run_drains", cluster="work", periodic=True)
        jobs.register_job("bulks", "accelerators.workflows.bulk_actions.run", cluster="work", periodic=True)
        jobs.register_job("rollouts", "accelerators.workflows.driver_rollouts.run", cluster="work", periodic=True)


def _renumber_transactions(**signal_arguments: Any) -> None:
    """After `migrate`, continue the transaction numbers of events above the highest stored one.

    A restored dump needs this, because the new database cluster numbers its transactions from a lower value on.
    """
    if (
        "plan" in signal_arguments and signal_arguments.get("using") == connection.alias
    ):  # `flush` in tests sends this signal without a plan
        with connection.cursor() as cursor:  # the ORM does not call SQL functions
            cursor.execute("SELECT to_regproc('accelerators_event_renumber') IS NOT NULL")
            if cursor.fetchone()[0]:
                cursor.execute("SELECT accelerators_event_renumber()")
