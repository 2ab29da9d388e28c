"""Rows of a lost network: all agents become silent at once and return at once, while clients use the API.

Their sockets stay open meanwhile, as they do when packets are lost. The state of each in `GET /api/agents` is judged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from django.db import connection

from tests.bench import fixtures, inventory, messages
from tests.bench.api_clients import REQUESTS
from tests.bench.figures import Row
from tests.bench.lab import Generator, Lab
from tests.bench.product import RunningProduct, get, wait_for
from tests.bench.remote_calls import MeasurementError

DEVICES = 8
BEATS_S, PAUSE_S = 4.0, 2.0
CLIENTS, CLIENT_PAUSE_S, WINDOW_S = 4, 0.1, 0.5
POLL_S, LONG_S = 0.1, 180.0
SILENT_LONG = """
UPDATE agents_lease SET seen_at = seen_at - interval '1 hour'
WHERE seen_at > now() - interval '1 minute' AND host_id IN (SELECT id FROM accelerators_host WHERE name LIKE 'bench-%')
"""


@dataclass
class StateWatch:
    """Polls the API for the states of the bench's hosts, ten times a second."""

    port: int
    token: str

    def wait_until_up(self) -> None:
        """Wait until every agent is up."""
        wait_for(
            lambda: self._is_list_empty("agents?state=late") and self._is_list_empty("agents?state=down"),
            "every agent up",
            patience_s=LONG_S,
        )

    def wait_until_late(self) -> None:
        """Wait until no agent is up."""
        wait_for(lambda: self._is_list_empty("agents?state=up"), "every agent late or down")

    def wait_until_stale(self) -> None:
        """Wait until every host is stale, which means that the conductor has recorded the silence."""
        wait_for(self.are_all_stale, "every host stale", patience_s=LONG_S)

    def are_all_stale(self) -> bool:
        """Return whether every host is stale."""
        return self._is_list_empty("hosts?stale=false")

    def _is_list_empty(self, what: str) -> bool:
        sleep(POLL_S)
        # Two results, because one of them may be the product's own agent.
        status, body = get(self.port, f"/api/{what}&limit=2", self.token)
        if status != 200:
            raise MeasurementError(f"GET /api/{what}: {status} {body[:200]!r}")
        return not any(self._get_host_name(one).startswith("bench-") for one in json.loads(body)["results"])

    def _get_host_name(self, one: dict[str, Any]) -> str:
        return str(one["name"] if "name" in one else one["host"]["name"])


@dataclass
class Clients:
    """The clients that use the API meanwhile."""

    generator: Generator
    port: int
    tokens: dict[str, str]
    phase: str = "silent"
    asked: Counter[str] = field(default_factory=Counter)
    slowest_ms: dict[str, list[float]] = field(default_factory=dict)
    """The durations of the slowest GETs, by phase."""
    ended: Event = field(default_factory=Event)

    def run(self) -> None:
        """Send GETs until `ended` is set."""
        one = f"/v2/devices?hostname={messages.host_name(0)}"
        paths = [one, f"{REQUESTS}?instance={uuid4()}", "/v2/device_profiles", "/api/agents?limit=50"]
        fixed: dict[str, Any] = {"port": self.port, "tokens": self.tokens, "paths": paths, "clients": CLIENTS}
        while not self.ended.is_set():
            done = self.generator.ask("fetch", seconds=WINDOW_S, pause=CLIENT_PAUSE_S, **fixed)
            self.asked[self.phase] += done["count"]
            self.slowest_ms.setdefault(self.phase, []).extend(done["slowest_ms"])

    def p99_ms(self, phase: str) -> float:
        """Return p99 of all GETs in a phase."""
        return sorted(self.slowest_ms[phase], reverse=True)[self.asked[phase] // 100]


@dataclass(frozen=True)
class ReturnTimes:
    """The return of all agents: seconds until all were connected, and until all were up."""

    connected_s: float
    up_s: float
    refused: int
    """Number of failed attempts; each was repeated."""

    def __str__(self) -> str:
        return f"connected after {self.connected_s:.1f} s, {self.refused} attempts refused"


def rows(
    lab: Lab,
    product: RunningProduct,
    generator: Generator,
    agents: int,
    progress: Callable[[str], None],
    meanwhile: Callable[[], None],
) -> list[Row]:
    """Return three rows; `meanwhile` is called while all agents are silent, and may take some seconds."""
    progress(f"{agents} agents fall silent at once, and come back at once")
    fixtures.enrol(agents)
    tokens = inventory.create_tokens()
    clients, watch = Clients(Generator(lab), product.port, tokens), StateWatch(product.port, tokens["X-Auth-Token"])
    generator.ask("storm", group="silent", port=product.port, count=agents, devices=DEVICES)
    generator.ask("run", group="silent", message="beat", devices=0, seconds=BEATS_S, pause=PAUSE_S)
    began = monotonic()
    watch.wait_until_up()
    with ThreadPoolExecutor(2) as aside:
        asking, other = aside.submit(clients.run), aside.submit(meanwhile)
        try:
            watch.wait_until_late()
            late = monotonic() - began
            watch.wait_until_stale()
            stale = monotonic() - began
            other.result()
            clients.phase = "back"
            plain = _measure_return(generator, watch, product.port, "", agents)
            clients.phase = "silent again"
            _simulate_long_silence(generator, watch)
            clients.phase = "back over TLS"
            secure = _measure_return(generator, watch, product.tls_port, product.fingerprint, agents)
        finally:
            clients.ended.set()
        asking.result()
    generator.ask("close", group="silent")
    clients.generator.stop()
    return _make_rows(agents, (late, stale), plain, secure, clients)


def _measure_return(generator: Generator, watch: StateWatch, port: int, fingerprint: str, agents: int) -> ReturnTimes:
    generator.ask("close", group="silent")
    began = monotonic()
    done = generator.ask("reconnect_all", group="silent", port=port, count=agents, fingerprint=fingerprint)
    watch.wait_until_up()
    return ReturnTimes(done["connected_s"], monotonic() - began, sum(done["refused"].values()))


def _simulate_long_silence(generator: Generator, watch: StateWatch) -> None:
    """Disconnect the agents and set the leases back, as after a long silence, instead of waiting for one again."""
    generator.ask("close", group="silent")

    def stale() -> bool:
        with connection.cursor() as cursor:
            cursor.execute(SILENT_LONG)  # repeated, because the gateway may still have leases to flush
        return watch.are_all_stale()

    wait_for(stale, "every host stale", patience_s=LONG_S)


def _make_rows(
    agents: int, silent: tuple[float, float], plain: ReturnTimes, secure: ReturnTimes, clients: Clients
) -> list[Row]:
    late, stale = silent
    phases = [(phase, clients.p99_ms(phase)) for phase in clients.asked]
    by_phase = ", ".join(f"{phase} {p99:.0f} of {clients.asked[phase]}" for phase, p99 in phases)
    asked = f"{CLIENTS} clients, {CLIENT_PAUSE_S} s between two GETs; {by_phase}"
    rule = f"a Beat and a flush of leases are no silence: 13 s of it by rule; every host stale after {stale:.1f} s"
    again = f"{plain}; over TLS {secure.up_s:.1f} s, {secure}"
    worst = max(clients.p99_ms(phase) for phase in ("silent", "back"))
    return [
        Row(f"{agents} agents silent at once: all late", late, "s", "open sockets, no Beats", 30.0, note=rule),
        Row(f"{agents} agents back at once: all up", plain.up_s, "s", "without TLS", 15.0, note=again),
        Row("API meanwhile, p99", worst, "ms", "without TLS", 1000.0, note=asked),
    ]
