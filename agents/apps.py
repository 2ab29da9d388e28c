"""Django application of the agents: registers its jobs, and the functions that other applications call."""

from django.apps import AppConfig


class AgentsConfig(AppConfig):
    """The Django application `agents`."""

    name = "agents"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the jobs `merge` and `leases`, the check whether an agent accepts commands, and the host page's
        agent section.

        Also register the functions that tell whether an agent can write to Placement, and that revoke one.
        """
        from accelerators.commands.command_queue import REACH_CHECKS
        from accelerators.commands.placement_delegation import WRITER_STATUSES
        from accelerators.runtime.jobs import JOBS, Job
        from accelerators.ui.extensions import PAGE_SECTIONS
        from accelerators.workflows.host_removal import AGENT_REVOKERS
        from agents import admin, key_revocation, liveness
        from agents.gateway import command_dispatch

        JOBS.register("merge", Job("agents.jobs.merge", cluster="ingest"))
        JOBS.register("leases", Job("agents.jobs.watch_leases", periodic=True))
        AGENT_REVOKERS.register("agents", key_revocation.revoke_host)
        REACH_CHECKS.register("agent", command_dispatch.find_agent_obstacles)
        WRITER_STATUSES.register("agents", liveness.get_writer_statuses)
        PAGE_SECTIONS.register("host.agent", admin.build_host_section)
