"""Django app configuration: registers the jobs and the holder check of this app."""

from typing import Any

from django.apps import AppConfig
from django.db import connection
from django.db.models.signals import post_migrate


class AcceleratorsConfig(AppConfig):
    name = "accelerators"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from accelerators import safety
        from accelerators.runtime.jobs import JOBS, Job

        post_migrate.connect(_renumber_transactions, sender=self)
        safety.HOLDER_CHECKS.register(safety.REQUESTS_CHECK, safety.find_requests_of_device)
        JOBS.register("sweep", Job("accelerators.workflows.sweep.run"))
        JOBS.register("seals", Job("accelerators.audit.retention.run"))
        JOBS.register("deadlines", Job("accelerators.requests.binding.run_deadlines", periodic=True))
        JOBS.register("commands", Job("accelerators.workflows.command_results.run", periodic=True))
        JOBS.register("images", Job("accelerators.images.download.run", periodic=True))
        JOBS.register("drains", Job("accelerators.devices.lifecycle.run_drains", periodic=True))
        JOBS.register("bulks", Job("accelerators.workflows.bulk_actions.run", periodic=True))
        JOBS.register("rollouts", Job("accelerators.workflows.driver_rollouts.run", periodic=True))


def _renumber_transactions(**signal_arguments: Any) -> None:
    """After `migrate`, continue the transaction numbers of events above the highest stored one.

    A restored dump needs this, because the new database cluster numbers its transactions from a lower value on.
    """
    if (
        "plan" in signal_arguments and signal_arguments.get("using") == connection.alias
    ):  # `flush` in tests sends this signal without a plan
        with connection.cursor() as cursor:
            cursor.execute("SELECT to_regproc('accelerators_event_renumber') IS NOT NULL")
            if cursor.fetchone()[0]:
                cursor.execute("SELECT accelerators_event_renumber()")
