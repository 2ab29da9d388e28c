"""`manage.py agents`: list the agents and their state, admit a barred agent again, or ask one for a new key."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from accelerators.domain.errors import RefusedError
from accelerators.domain.states import AgentState
from accelerators.management import shell
from agents import key_revocation
from agents.liveness import build_state_condition, get_agent_state, get_last_heard, get_state_since
from agents.models import Agent

COLUMNS = ("host", "state", "version", "wire", "since", "note")


class Command(BaseCommand):
    """`manage.py agents`: list the agents, admit one that was barred as a clone, or ask one for a new key."""

    help = (
        "List agents and their state: up, late or down, depending on the last heartbeat; revoked; or clone, if two "
        "machines used one key. --admit and --rotate change one agent; see also `join_token` and `revoke_agent`."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare --json and --state, and --admit and --rotate, of which only one may be given."""
        parser.add_argument("--json", action="store_true", help="print JSON, for programs")
        parser.add_argument(
            "--state", choices=[state.value for state in AgentState], help="list only agents in this state"
        )
        decision = parser.add_mutually_exclusive_group()
        decision.add_argument("--admit", metavar="HOST", help="let an agent that was barred as a clone connect again")
        decision.add_argument("--rotate", metavar="HOST", help="ask an agent for a new key when it is connected")

    def handle(self, *args: Any, **options: Any) -> None:
        """Admit the agent of `--admit`, ask the one of `--rotate` for a new key, or print the list of agents."""
        if host := options["admit"]:
            was_barred = self._apply_decision(host, key_revocation.lift_clone_bar)
            self.stdout.write(f"The agent of {host} {'may connect again' if was_barred else 'is not barred'}.")
        elif host := options["rotate"]:
            self._apply_decision(host, key_revocation.request_key_rotation)
            self.stdout.write(
                f"The agent of {host} is asked for a new key; the event agent.rotated records when it has one."
            )
        else:
            self._print_agents(options["state"], options["json"])

    def _apply_decision(self, host: str, decision: Callable[[Agent, str], Any]) -> Any:
        """Call `decision` with the host's agent and return its result. Raise CommandError if there is no agent or it is
        refused."""
        try:
            return decision(key_revocation.find_agent(host), "command line")
        except RefusedError as refused:
            raise CommandError(refused.text) from None

    def _print_agents(self, state: str | None, as_json: bool) -> None:
        """Print the agents by host name, as a table or as JSON; with `state`, only those in this state."""
        queryset = Agent.objects.select_related("host__lease").order_by("host__name")
        agents = list(queryset.filter(build_state_condition(state)) if state else queryset)
        if as_json:
            self.stdout.write(json.dumps([_describe_agent(agent) for agent in agents], indent=2))
        elif not agents:
            self.stdout.write("No agent has joined. Make a join token with `manage.py join_token HOST`.")
        else:
            rows = [COLUMNS, *(_format_row(agent) for agent in agents)]
            for line in shell.format_table(rows):
                self.stdout.write(line)


def _format_row(agent: Agent) -> tuple[str, ...]:
    """Return the agent's cells for the columns COLUMNS; `note` is why it is barred, or that a new key is asked for."""
    moment = get_state_since(agent)
    rotation_note = "a new key is asked for" if agent.rotate_asked_at else ""
    return (
        agent.host.name,
        get_agent_state(agent),
        agent.version or "-",
        agent.wire or "-",
        f"{moment:%Y-%m-%d %H:%M:%S}" if moment else "never",
        agent.barred_reason or rotation_note,
    )


def _describe_agent(agent: Agent) -> dict[str, object]:
    """Return the agent as `--json` prints it; times are ISO 8601 texts or None."""
    return {
        "host": agent.host.name,
        "uuid": str(agent.host.uuid),
        "state": get_agent_state(agent),
        "reason": agent.barred_reason,
        "version": agent.version,
        "wire": agent.wire,
        "since": _format_time(get_state_since(agent)),
        "seen_at": _format_time(get_last_heard(agent)),
        "connected_at": _format_time(agent.connected_at),
        "boot_id": agent.boot_id,
        "epoch": agent.epoch,
        "address": agent.address,
        "fingerprint": agent.fingerprint,
        "newest_certificate": agent.newest_certificate,
        "public_key": agent.public_key,
        "key_since": _format_time(agent.key_since),
        "rotate_asked_at": _format_time(agent.rotate_asked_at),
    }


def _format_time(moment: datetime | None) -> str | None:
    """Return the time in ISO 8601, None for None."""
    return moment.isoformat() if moment else None
