"""Django application of the agents: registers its jobs and what other applications ask it."""

from django.apps import AppConfig


class AgentsConfig(AppConfig):
    name = "agents"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from accelerators.commands import placement_delegation, placing
        from accelerators.runtime import jobs
        from agents import liveness
        from agents.gateway import command_dispatch

        jobs.register("merge", "agents.tasks.merge", cluster="ingest")
        placing.register(command_dispatch.reach)
        placement_delegation.register(hands=liveness.hands)
        jobs.register("leases", "agents.tasks.watch_leases", cluster="work", timely=True)
