"""`manage.py agents`: list the agents and their state, admit a barred agent again, or ask one for a new key."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from accelerators.domain.errors import RefusedError
from accelerators.management import shell
from agents import key_revocation
from agents.liveness import WORDS, seen_at, since, standing, word_of
from agents.models import Agent

COLUMNS = ("host", "state", "version", "wire", "since", "note")


class Command(BaseCommand):
    help = (
        "List agents and their state: up, late or down by when they were last heard; revoked; or clone, if two "
        "machines used one key. --admit and --rotate change one agent; see also `join_token` and `revoke_agent`."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON, for programs")
        parser.add_argument("--state", choices=WORDS, help="list only agents in this state")
        decision = parser.add_mutually_exclusive_group()
        decision.add_argument("--admit", metavar="HOST", help="admit again an agent that was barred as a clone")
        decision.add_argument("--rotate", metavar="HOST", help="ask an agent for a new key when it is connected")

    def handle(self, *args: Any, **options: Any) -> None:
        if host := options["admit"]:
            done = self._decide(host, key_revocation.admit)
            self.stdout.write(f"The agent of {host} {'may connect again' if done else 'is not barred'}.")
        elif host := options["rotate"]:
            self._decide(host, key_revocation.ask_rotation)
            self.stdout.write(
                f"The agent of {host} is asked for a new key; the event agent.rotated records when it has one."
            )
        else:
            self._list(options["state"], options["json"])

    def _decide(self, host: str, decide: Callable[[Agent, str], Any]) -> Any:
        try:
            return decide(key_revocation.find(host), "command line")
        except RefusedError as refused:
            raise CommandError(refused.text) from None

    def _list(self, word: str | None, as_json: bool) -> None:
        found = Agent.objects.select_related("host__lease").order_by("host__name")
        agents = list(found.filter(standing(word)) if word else found)
        if as_json:
            self.stdout.write(json.dumps([_facts(agent) for agent in agents], indent=2))
        elif not agents:
            self.stdout.write("No agent has joined. Make a join token with `manage.py join_token HOST`.")
        else:
            rows = [COLUMNS, *(_row(agent) for agent in agents)]
            for line in shell.table(rows):
                self.stdout.write(line)


def _row(agent: Agent) -> tuple[str, ...]:
    moment = since(agent)
    asked = "a new key is asked for" if agent.rotate_asked_at else ""
    return (
        agent.host.name,
        word_of(agent),
        agent.version or "-",
        agent.wire or "-",
        f"{moment:%Y-%m-%d %H:%M:%S}" if moment else "never",
        agent.barred_reason or asked,
    )


def _facts(agent: Agent) -> dict[str, object]:
    return {
        "host": agent.host.name,
        "uuid": str(agent.host.uuid),
        "state": word_of(agent),
        "reason": agent.barred_reason,
        "version": agent.version,
        "wire": agent.wire,
        "since": _iso(since(agent)),
        "seen_at": _iso(seen_at(agent)),
        "connected_at": _iso(agent.connected_at),
        "boot_id": agent.boot_id,
        "epoch": agent.epoch,
        "address": agent.address,
        "public_key": agent.public_key,
        "key_since": _iso(agent.key_since),
        "rotate_asked_at": _iso(agent.rotate_asked_at),
    }


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None
