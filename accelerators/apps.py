"""Django app configuration: registers the jobs and the search providers of this app."""

from typing import Any

from django.apps import AppConfig
from django.db import connection
from django.db.models import F, Value
from django.db.models.functions import Concat, JSONObject
from django.db.models.signals import post_migrate


class AcceleratorsConfig(AppConfig):
    """The Django app of `accelerators`; `ready` fills the registries."""

    name = "accelerators"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the jobs and the search providers, once when Django has started."""
        from accelerators import models
        from accelerators.runtime.jobs import JOBS, Job
        from accelerators.ui import badges, devices
        from accelerators.ui.extensions import SEARCH_PROVIDERS, SearchProvider

        post_migrate.connect(_renumber_transactions, sender=self)
        JOBS.register("sweep", Job("accelerators.workflows.retention_sweep.run"))
        JOBS.register("seals", Job("accelerators.audit.retention.run"))
        JOBS.register("verification", Job("accelerators.audit.verification_job.run"))
        JOBS.register("deadlines", Job("accelerators.requests.binding.run_deadlines", periodic=True))
        JOBS.register("commands", Job("accelerators.workflows.command_endings.run", periodic=True))
        JOBS.register("releases", Job("accelerators.workflows.release_checks.run", periodic=True))
        JOBS.register("images", Job("accelerators.images.download.run", periodic=True))
        JOBS.register("drains", Job("accelerators.devices.lifecycle.run_drains", periodic=True))
        JOBS.register("bulks", Job("accelerators.workflows.bulk_actions.run", periodic=True))
        JOBS.register("removals", Job("accelerators.workflows.host_removal.run", periodic=True, intent_kind="removal"))
        JOBS.register("rollouts", Job("accelerators.workflows.driver_rollouts.run", periodic=True))
        for provider in (
            SearchProvider(models.Host, ("uuid", "name"), F("name"), F("node")),
            SearchProvider(
                models.Device,
                ("uuid", "address", "key"),
                JSONObject(vendor="vendor", model="model", subsystem="subsystem", key="key"),
                F("host__name"),
                devices.describe_hit,
                devices.find_by_name,
            ),
            SearchProvider(models.Deployable, ("uuid", "rp_uuid"), F("name"), F("device__host__name")),
            SearchProvider(
                models.AttachHandle,
                ("uuid", "attach_info"),
                F("attach_info"),
                F("deployable__device__host__name"),
                badges.describe_handle,
            ),
            SearchProvider(models.AcceleratorRequest, ("uuid", "instance_uuid"), F("uuid"), F("state")),
            SearchProvider(models.DeviceProfile, ("uuid", "name"), F("name"), Value("")),
            SearchProvider(models.Command, ("uuid",), Concat("op", Value(" "), "device_name"), F("host__name")),
        ):
            SEARCH_PROVIDERS.register(provider.model._meta.label_lower, provider)


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
