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

        from accelerators import fetching, intents, ticks
        from accelerators.api.own import instances
        from placement_sync.glance import Glance
        from placement_sync.nova import Nova

        ticks.register("placement", "placement_sync.tasks.run", cluster="work", timely=True)
        intents.register("provider", "placement")
        ticks.register("notices", "placement_sync.tell.run", cluster="work", timely=True)
        intents.register("notice", "notices")
        ticks.register("instances", "placement_sync.watcher.run", cluster="work", timely=True)

        def session() -> Any:
            return import_string(settings.SERVICE_SESSION)()

        endpoint = settings.KEYS.nova_endpoint
        if endpoint != "off":
            instances.register(Nova(session, endpoint))
        ticks.register("images", "accelerators.fetching.run", cluster="work", timely=True)
        if settings.KEYS.glance_endpoint != "off":
            fetching.register(Glance(session, settings.KEYS.glance_endpoint))
