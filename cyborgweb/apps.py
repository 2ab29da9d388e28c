"""Django's face of the house."""

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class CyborgwebConfig(AppConfig):
    name = "cyborgweb"
    verbose_name = "Access"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from accelerators import ticks

        post_migrate.connect(_migrated, sender=self)
        ticks.register("messages", "cyborgweb.notify.fanout.run", cluster="work", timely=True)
        ticks.register("deliveries", "cyborgweb.notify.sender.run", cluster="work", timely=True)
        ticks.register("mails", "cyborgweb.notify.sender.run_mails", cluster="work", timely=True)


def _migrated(**about: Any) -> None:
    """After `migrate`: the groups there are always, with what they may see."""
    from cyborgweb import roles

    if about.get("plan") is not None and about.get("apps") and about["apps"].is_installed("auth"):
        for role in roles.ROLES:
            roles.group(role.group)
