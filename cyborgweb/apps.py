"""Django's face of the house."""

from django.apps import AppConfig


class CyborgwebConfig(AppConfig):
    name = "cyborgweb"
    verbose_name = "Access"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from accelerators import ticks

        ticks.register("messages", "cyborgweb.notify.fanout.run", cluster="work", timely=True)
        ticks.register("deliveries", "cyborgweb.notify.sender.run", cluster="work", timely=True)
