"""Django's face of the room: what it tells others of OpenStack."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig


class PlacementSyncConfig(AppConfig):
    name = "placement_sync"
    verbose_name = "OpenStack"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django.conf import settings
        from django.utils.module_loading import import_string

        from accelerators import attachments, delegation, fetching, safety, ticks
        from accelerators.api.own import instances
        from placement_sync import attaching, witness, writers
        from placement_sync.glance import Glance
        from placement_sync.nova import Nova

        def session() -> Any:
            return import_string(settings.SERVICE_SESSION)()

        keys = settings.KEYS
        delegation.register(epoch=writers.epoch)
        # What was attached while there was a cloud is detached without one, too.
        ticks.register("attachments", "placement_sync.attaching.run", cluster="work", timely=True, intent="attachment")
        if keys.nova_endpoint != "off":
            instances.register(Nova(session, keys.nova_endpoint))
        if keys.has_cloud and keys.placement_endpoint != "off":
            ticks.register("placement", "placement_sync.tasks.run", cluster="work", timely=True, intent="provider")
            ticks.register("faults", "placement_sync.faults.run", cluster="work", timely=True)
            safety.register("placement", witness.allocations)
        if keys.has_cloud and keys.nova_endpoint != "off":
            ticks.register("notices", "placement_sync.tell.run", cluster="work", timely=True, intent="notice")
            ticks.register("instances", "placement_sync.watcher.run", cluster="work", timely=True)
            attachments.register(attaching.look)
            safety.register("nova", witness.instances)
        if settings.KEYS.glance_endpoint != "off":
            fetching.register(Glance(session, settings.KEYS.glance_endpoint))
