"""Django app configuration: register the jobs, holder checks and services that talk to OpenStack."""

from __future__ import annotations

from django.apps import AppConfig


class PlacementSyncConfig(AppConfig):
    """The Django app of `placement_sync`; `ready` fills the registries."""

    name = "placement_sync"
    verbose_name = "OpenStack"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register everything that the configured endpoints allow.

        An endpoint that is `off` registers nothing of its service. The job `attachments`, the writer's epoch and the
        sections of pages are always registered. The other jobs, the holder checks and the instance lookup also need a
        configured cloud.
        """
        from django.conf import settings

        from accelerators.api.own.instances import INSTANCE_STATES
        from accelerators.commands.placement_delegation import WRITER_EPOCH
        from accelerators.images.download import IMAGE_SERVICE
        from accelerators.runtime.jobs import JOBS, Job
        from accelerators.safety import HOLDER_CHECKS
        from accelerators.ui.extensions import PAGE_SECTIONS
        from accelerators.workflows.attachment_orders import INSTANCE_LOOKUP
        from accelerators.workflows.host_removal import HOST_CLEANUPS
        from placement_sync.admin import sections
        from placement_sync.cloud import get_service_session
        from placement_sync.glance import GlanceClient
        from placement_sync.jobs import attachments, holder_checks, host_removal, writer_election
        from placement_sync.nova.client import InstanceStateCache

        keys = settings.KEYS
        WRITER_EPOCH.register("placement_sync", writer_election.get_epoch)
        PAGE_SECTIONS.register("host.faults", sections.build_host_section)
        PAGE_SECTIONS.register("device.faults", sections.build_device_section)
        PAGE_SECTIONS.register("request.faults", sections.build_request_section)
        # Registered without a cloud, too: what was attached while a cloud was configured can still be detached.
        JOBS.register(
            "attachments", Job("placement_sync.jobs.attachments.run", periodic=True, intent_kind="attachment")
        )
        if keys.nova_endpoint != "off":
            INSTANCE_STATES.register("nova", InstanceStateCache(get_service_session, keys.nova_endpoint))
        if keys.has_cloud and keys.placement_endpoint != "off":
            JOBS.register("placement", Job("placement_sync.jobs.providers.run", periodic=True, intent_kind="provider"))
            JOBS.register("faults", Job("placement_sync.jobs.discrepancies.run", periodic=True))
            HOST_CLEANUPS.register("placement", host_removal.delete_providers)
            HOLDER_CHECKS.register("placement", holder_checks.PLACEMENT_CHECK)
        if keys.has_cloud and keys.nova_endpoint != "off":
            JOBS.register("notices", Job("placement_sync.nova.notices_job.run", periodic=True, intent_kind="notice"))
            JOBS.register("instances", Job("placement_sync.nova.deleted_instances.run", periodic=True))
            INSTANCE_LOOKUP.register("nova", attachments.look_up_instance)
            HOLDER_CHECKS.register("nova", holder_checks.NOVA_CHECK)
        if keys.glance_endpoint != "off":
            client = GlanceClient(get_service_session, keys.glance_endpoint, keys.image_owners)
            IMAGE_SERVICE.register("glance", client)
