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

        from accelerators.api.own import instances
        from placement_sync.nova import Nova

        def session() -> Any:
            return import_string(settings.SERVICE_SESSION)()

        endpoint = settings.KEYS.nova_endpoint
        if endpoint != "off":
            instances.register(Nova(session, endpoint))
