"""Django's face of the room: the conductor's end of the wire."""

from django.apps import AppConfig


class AgentsConfig(AppConfig):
    name = "agents"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from accelerators import commands, delegation, ticks
        from agents import courier, standing

        ticks.register("merge", "agents.tasks.merge", cluster="ingest")
        commands.register(courier.reach)
        delegation.register(hands=standing.hands)
        ticks.register("leases", "agents.tasks.watch_leases", cluster="work", timely=True)
