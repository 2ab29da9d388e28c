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

        jobs.register_job("merge", "agents.tasks.merge", cluster="ingest")
        placing.register_reach_check(command_dispatch.explain_unreachable)
        placement_delegation.register_sources(status_source=liveness.get_writer_statuses)
        jobs.register_job("leases", "agents.tasks.watch_leases", cluster="work", periodic=True)
