"""Rows of the API's reads: lists, an instance's requests, authentication of a caller, and heartbeats during lists.

The ceilings are views in the same server (`tests.bench.views`). The same clients call them with the same tokens, and
product and ceiling take turns; the ratio is the median over the rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import thread_time
from typing import Any

from django.test import RequestFactory
from rest_framework.request import Request

from accelerators.api.v2.requests import RequestList
from cyborgweb.auth.authentication import CallerAuthentication
from cyborgweb.auth.policy import RulePermission
from tests.bench import fixtures, inventory, rows_requests
from tests.bench.api_clients import REQUESTS
from tests.bench.figures import Row, cpu_s, median
from tests.bench.lab import Generator, Lab, Server, run_server
from tests.bench.statements import collect_statements
from tests.support.keystone import vouching

DEVICES = "/v2/devices"
LISTERS = 16
AGENTS, PAUSE_S = 250, 0.5
"""Together 500 heartbeats a second, the rate of 4 000 real agents: few enough not to queue."""
CALLS = 2_000


@dataclass(frozen=True)
class Size:
    """Devices per list, requests of other projects, rounds and their seconds, heartbeat rounds, seconds of cycles."""

    devices: tuple[int, ...]
    others: int
    rounds: int
    seconds: float
    beats: int
    cycles_s: float


@dataclass(frozen=True)
class Turn:
    """The results of one turn of one contestant."""

    rate: float
    cpu_us: float
    p50_ms: float
    bytes: int


def rows(lab: Lab, generator: Generator, size: Size, progress: Callable[[str], None]) -> list[Row]:
    """Return all rows of the API except the one that needs the whole product."""
    progress("a cached token and the policy check")
    found = [_measure_admission()]
    tokens = inventory.create_tokens()
    callers = Generator(lab)
    with run_server(lab, "product", DJANGO_SETTINGS_MODULE="tests.bench.settings") as server:
        for count in size.devices:
            progress(f"listing {count} devices against PostgreSQL's json_agg")
            offers = inventory.create_ready_devices(count)
            found.append(_measure_list(callers, server, tokens, count, size))
            if count == size.devices[0]:
                progress(f"Beats, idle and while {LISTERS} clients list {count} devices")
                found.append(_measure_beats_during_lists(generator, callers, server, tokens, size))
        progress(f"an instance's requests among {size.others} against one indexed query")
        found.append(_measure_instance_requests(lab, callers, server, tokens, size))
    found += rows_requests.measure_in_process(offers, size.others, size.cycles_s, progress)
    found.append(rows_requests.measure_granian(lab, callers, tokens, offers, size.cycles_s, progress))
    callers.stop()
    fixtures.empty_inventory()
    return found


def run_contest(
    callers: Generator, server: Server, tokens: dict[str, str], contestants: list[list[str]], clients: int, size: Size
) -> list[list[Turn]]:
    """Let contestants (lists of paths) take turns; return the turns of each without the first, which warms up."""
    turns: list[list[Turn]] = [[] for _ in contestants]
    for number in range(size.rounds + 1):
        for paths, of in zip(contestants, turns, strict=True):
            before = cpu_s(server.pid)
            arguments: dict[str, Any] = {"port": server.port, "tokens": tokens, "paths": paths, "clients": clients}
            done = callers.ask("fetch", seconds=size.seconds, **arguments)
            spent = (cpu_s(server.pid) - before) / done["count"] * 1e6
            if number:
                of.append(Turn(done["count"] / done["seconds"], spent, done["p50_ms"], done["bytes"]))
    return turns


def _measure_list(callers: Generator, server: Server, tokens: dict[str, str], count: int, size: Size) -> Row:
    ceiling, ours = run_contest(callers, server, tokens, [["/bench/devices"], [DEVICES]], 1, size)
    ratio = median([theirs.p50_ms / mine.p50_ms for theirs, mine in zip(ceiling, ours, strict=True)])
    cpu, of = (median([turn.cpu_us for turn in turns]) for turns in (ours, ceiling))
    note = (
        f"one client; {ours[0].bytes} bytes against {ceiling[0].bytes}; CPU of the server {cpu:.0f} against {of:.0f} µs"
    )
    value, best = (median([turn.p50_ms for turn in turns]) for turns in (ours, ceiling))
    return Row(f"list of {count} devices", value, "ms", "json_agg passed through", 0.5, best, ratio, cpu, note)


def _measure_instance_requests(lab: Lab, callers: Generator, server: Server, tokens: dict[str, str], size: Size) -> Row:
    instances = inventory.create_other_requests(size.others)
    contestants = [[f"/bench/requests/{one}" for one in instances], [f"{REQUESTS}?instance={one}" for one in instances]]
    ceiling, ours = run_contest(callers, server, tokens, contestants, rows_requests.CLIENTS, size)
    arguments: dict[str, Any] = {"port": server.port, "tokens": tokens, "paths": contestants[1], "clients": 1}
    with collect_statements(lab) as counted:
        done = callers.ask("fetch", seconds=0.5, **arguments)
    each = len(counted) / done["count"]
    ratio = median([mine.rate / theirs.rate for theirs, mine in zip(ceiling, ours, strict=True)])
    cpu, of = (median([turn.cpu_us for turn in turns]) for turns in (ours, ceiling))
    note = (
        f"{size.others} requests, {rows_requests.CLIENTS} clients; {each:.2f} statements each in PostgreSQL's log, the"
        f" connection's health check among them; CPU of the server {cpu:.0f} against {of:.0f} µs"
    )
    value, best = (median([turn.rate for turn in turns]) for turns in (ours, ceiling))
    against = "bare view, one indexed query"
    return Row("an instance's requests", value, "/s", against, 0.7, best, ratio, cpu, note, each < 3.1)


def _measure_beats_during_lists(
    generator: Generator, callers: Generator, server: Server, tokens: dict[str, str], size: Size
) -> Row:
    fixtures.enrol(AGENTS)
    generator.connect("beats", server.port, AGENTS)
    seconds = 3 * PAUSE_S

    def beat() -> dict[str, Any]:
        return generator.ask("run", group="beats", message="beat", devices=0, seconds=seconds, pause=PAUSE_S)

    arguments: dict[str, Any] = {"port": server.port, "tokens": tokens, "paths": [DEVICES], "clients": LISTERS}
    idle: list[dict[str, Any]] = []
    busy: list[dict[str, Any]] = []
    lists: list[float] = []
    with ThreadPoolExecutor(1) as aside:
        for _ in range(size.beats + 1):
            idle.append(beat())
            listing = aside.submit(callers.ask, "fetch", seconds=seconds + 0.3, **arguments)
            busy.append(beat())
            done = listing.result()
            lists.append(done["count"] / done["seconds"])
    generator.ask("close", group="beats")
    best, value = ([turn["p99_ms"] for turn in turns[1:]] for turns in (idle, busy))
    ratio = median([alone / among for alone, among in zip(best, value, strict=True)])
    middle = median([turn["p50_ms"] for turn in busy[1:]])
    note = (
        f"{AGENTS / PAUSE_S:.0f} Beats/s of {AGENTS} agents, {median(lists):.0f} lists/s of {size.devices[0]} devices"
        f" meanwhile, p50 {middle:.1f} ms; at most five times as long"
    )
    name = f"Beat acknowledged while {LISTERS} clients list, p99"
    return Row(name, median(value), "ms", "the same, idle", 0.2, median(best), ratio, note=note)


def _measure_admission() -> Row:
    """Measure the cost of a request before its handler: the caller from a cached token, the cached policy check."""
    times: list[float] = []
    with vouching() as keystone:
        made = RequestFactory().get(REQUESTS, headers={"X-Auth-Token": keystone.token("member", "reader")})
        request, view, identity, policy = Request(made), RequestList(), CallerAuthentication(), RulePermission()
        for _ in range(21):
            began = thread_time()
            for _ in range(CALLS):
                request.user, _ = identity.authenticate(request)
                policy.has_permission(request, view)
            times.append((thread_time() - began) / CALLS * 1e6)
        validations = keystone.calls["validate"]
    note = f"as the views do it, headers parsed; Keystone was asked {validations} time for {len(times) * CALLS} checks"
    return Row("cached token and policy check", median(times[1:]), "µs", "CPU", 20.0, note=note, holds=validations == 1)
