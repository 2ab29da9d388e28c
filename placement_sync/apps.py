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
        from placement_sync.glance import GlanceClient
        from placement_sync.jobs import attachments as attaching
        from placement_sync.jobs import holder_checks, writer_election
        from placement_sync.nova.client import InstanceStateCache

        def session() -> Any:
            return import_string(settings.SERVICE_SESSION)()

        keys = settings.KEYS
        placement_delegation.register_sources(epoch_source=writer_election.get_epoch)
        # Registered without a cloud, too: what was attached while a cloud was configured can still be detached.
        jobs.register_job(
            "attachments",
            "placement_sync.jobs.attachments.run",
            cluster="work",
            periodic=True,
            intent_kind="attachment",
        )
        if keys.nova_endpoint != "off":
            instances.register_source(InstanceStateCache(session, keys.nova_endpoint))
        if keys.has_cloud and keys.placement_endpoint != "off":
            jobs.register_job(
                "placement", "placement_sync.jobs.providers.run", cluster="work", periodic=True, intent_kind="provider"
            )
            jobs.register_job("faults", "placement_sync.jobs.discrepancies.run", cluster="work", periodic=True)
            safety.register_holder_check("placement", holder_checks.check_placement)
        if keys.has_cloud and keys.nova_endpoint != "off":
            jobs.register_job(
                "notices", "placement_sync.nova.notices_job.run", cluster="work", periodic=True, intent_kind="notice"
            )
            jobs.register_job("instances", "placement_sync.nova.deleted_instances.run", cluster="work", periodic=True)
            attachments.register_instance_lookup(attaching.look_up_instance)
            safety.register_holder_check("nova", holder_checks.check_nova)
        if settings.KEYS.glance_endpoint != "off":
            download.register_image_service(GlanceClient(session, settings.KEYS.glance_endpoint))
