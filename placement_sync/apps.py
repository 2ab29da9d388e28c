"""Django app configuration: register the jobs, holder checks and services that talk to OpenStack."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig


class PlacementSyncConfig(AppConfig):
    name = "placement_sync"
    verbose_name = "OpenStack"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register everything that the configured endpoints allow.

        An endpoint that is `off` registers nothing of its service. The job `attachments` and the writer's epoch are
        always registered.
        """
        from django.conf import settings
        from django.utils.module_loading import import_string

        from accelerators import safety
        from accelerators.api.own import instances
        from accelerators.commands import placement_delegation
        from accelerators.images import download
        from accelerators.runtime import jobs
        from accelerators.workflows import attachments
        from placement_sync.glance import Glance
        from placement_sync.jobs import attachments as attaching
        from placement_sync.jobs import holder_checks, writer_election
        from placement_sync.nova.client import Nova

        def session() -> Any:
            return import_string(settings.SERVICE_SESSION)()

        keys = settings.KEYS
        placement_delegation.register(epoch=writer_election.epoch)
        # Registered without a cloud, too: what was attached while a cloud was configured can still be detached.
        jobs.register(
            "attachments", "placement_sync.jobs.attachments.run", cluster="work", timely=True, intent="attachment"
        )
        if keys.nova_endpoint != "off":
            instances.register(Nova(session, keys.nova_endpoint))
        if keys.has_cloud and keys.placement_endpoint != "off":
            jobs.register(
                "placement", "placement_sync.jobs.providers.run", cluster="work", timely=True, intent="provider"
            )
            jobs.register("faults", "placement_sync.jobs.discrepancies.run", cluster="work", timely=True)
            safety.register("placement", holder_checks.allocations)
        if keys.has_cloud and keys.nova_endpoint != "off":
            jobs.register(
                "notices", "placement_sync.nova.notices_job.run", cluster="work", timely=True, intent="notice"
            )
            jobs.register("instances", "placement_sync.nova.deleted_instances.run", cluster="work", timely=True)
            attachments.register(attaching.look)
            safety.register("nova", holder_checks.instances)
        if settings.KEYS.glance_endpoint != "off":
            download.register(Glance(session, settings.KEYS.glance_endpoint))
