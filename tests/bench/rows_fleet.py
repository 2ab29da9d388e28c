"""Rows of a fleet against the whole product: a storm with reports, a census, agents at rest, and a soak with kills.

The agents are those of `tests.fleet`: they back off, honour Retry-After and the jitter that the gateway sends, and
remember what was acknowledged; at the end this is compared with the tables.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep

from django.db import connection

from tests.bench import fixtures, messages
from tests.bench.figures import Row, cpu_s, median
from tests.bench.lab import Generator, Lab, run_server
from tests.bench.product import RunningProduct, api_token, post, wait_for
from tests.bench.statements import collect_statements_by_backend
from tests.fleet import soak, verdict
from tests.fleet.installation import Fleet, Installation
from tests.fleet.memory_trend import BOUND_MB_H
from tests.fleet.scenarios import ScenarioRun, run_and_judge

DEVICES = 8
REPORTERS = 200
CENSUS_HOSTS, CENSUSES = 1000, 5
"""The number of hosts in one census, and the number of censuses."""
BEAT_S, FLUSH_S = 8.0, 5.0
"""The product's default intervals of heartbeats and of lease flushes."""
PATIENCE_S = 600.0
LEASES = "INSERT INTO agents_lease"


@dataclass(frozen=True)
class Size:
    """Numbers of agents and seconds of each part; with `soak_s` 0 there is no soak."""

    storm: int
    rest: int
    rest_s: float
    soak: int = 1000
    soak_s: float = 0.0


def rows(
    lab: Lab, product: RunningProduct, generator: Generator, size: Size, progress: Callable[[str], None]
) -> list[Row]:
    """Return up to six rows, all measured on one running product."""
    found = _measure_storm(lab, product, generator, size.storm, progress)
    found += _measure_rest(lab, product, size, progress)
    if size.soak_s:
        found += _measure_soak(lab, product, size, progress)
    fixtures.empty_inventory()
    return found


def _measure_storm(
    lab: Lab, product: RunningProduct, generator: Generator, count: int, progress: Callable[[str], None]
) -> list[Row]:
    progress(f"{count} agents of a fleet connect and report, against bare connects and reports alone")
    fixtures.enrol(count)
    with run_server(lab, "bare") as bare:
        connects = count / generator.ask("storm", group="bare", port=bare.port, count=count, devices=0)["connected_s"]
        generator.ask("close", group="bare")
    reports = _measure_durable_rate(product, generator)
    fixtures.empty_inventory()
    fleet = Fleet(lab)
    try:
        installation = Installation(lab, product, fleet, count, DEVICES)
        began, durable = monotonic(), 0.0
        installation.power_on()
        while (snapshot := installation.take_snapshot()).devices != count * DEVICES or snapshot.owing:
            if not durable and not snapshot.owing and snapshot.connected == count:
                durable = monotonic() - began
            if monotonic() - began > PATIENCE_S:
                break
            sleep(0.2)
        seen = monotonic() - began
        durable = durable or seen
        done, snapshot = verdict.wait_until_settled(installation, PATIENCE_S)
        lost = verdict.find_lost_hosts(installation)
        census = _measure_census(product, count, progress)
    finally:
        fleet.stop()
    ceiling = count / connects + count / reports
    note = (
        f"{connects:.0f} bare connects/s, {reports:.0f} durable reports/s; {snapshot.sent_away} told to come back,"
        f" {len(lost)} hosts lost; {'all' if done else 'NOT all'} up at the end"
    )
    name = f"{count} agents x {DEVICES} devices connect and report"
    against = "bare connects, then reports"
    holds = done and not lost
    return [
        Row(f"{name}: durable", durable, "s", against, 0.40, ceiling, ceiling / durable, None, note, holds),
        Row(f"{name}: visible", seen, "s", against, 0.40, ceiling, ceiling / seen, None, "", holds),
        census,
    ]


def _measure_census(product: RunningProduct, connected: int, progress: Callable[[str], None]) -> Row:
    """Measure POST /api/census/: ask hosts of a connected fleet for their load; count the hosts that answered."""
    names = [messages.host_name(number) for number in range(min(CENSUS_HOSTS, connected))]
    progress(f"a census of {len(names)} hosts")
    token, took, answered = api_token(), list[float](), list[int]()
    for _ in range(CENSUSES):
        began = monotonic()
        status, body = post(product.port, "/api/census/", token, {"hosts": names, "count": DEVICES})
        took.append(monotonic() - began)
        answer = json.loads(body) if status == 200 else {"came": 0}
        answered.append(answer["came"])
    note = (
        f"POST /api/census/, {connected} agents of {DEVICES} devices connected; at least {min(answered)} hosts answered"
    )
    holds = min(answered) == len(names)
    return Row(f"census of {len(names)} hosts", median(took), "s", "", 3.0, note=note, holds=holds)


def _measure_durable_rate(product: RunningProduct, generator: Generator) -> float:
    """Return how many reports a second the product makes durable when no agent connects meanwhile."""
    generator.connect("reporters", product.port, REPORTERS)
    done = generator.ask("run", group="reporters", message="report", devices=DEVICES, seconds=1.0)
    generator.ask("close", group="reporters")
    wait_for(lambda: not _has_spooled_reports(), "the reports are merged", patience_s=PATIENCE_S)
    return float(done["count"] / done["seconds"])


def _has_spooled_reports() -> bool:
    from agents.models import Spooled

    return Spooled.objects.exists()


def _measure_rest(lab: Lab, product: RunningProduct, size: Size, progress: Callable[[str], None]) -> list[Row]:
    progress(f"{size.rest} agents at rest for {size.rest_s:.0f} s")
    fixtures.enrol(size.rest)
    fleet, web = Fleet(lab), product.child("cyborgweb.server.web_server")
    try:
        installation = Installation(lab, product, fleet, size.rest, 1)
        installation.power_on()
        _, before = verdict.wait_until_settled(installation, PATIENCE_S)
        spent, began = cpu_s(web), monotonic()
        sleep(size.rest_s)
        share = (cpu_s(web) - spent) / (monotonic() - began)
        with collect_statements_by_backend(lab) as found:  # afterwards, because PostgreSQL then logs each statement
            began = monotonic()
            sleep(max(size.rest_s / 2, 2 * FLUSH_S))
            took = monotonic() - began
        after = installation.take_snapshot()
    finally:
        fleet.stop()
    beats = (after.counts["beats"] - before.counts["beats"]) / (after.at - before.at)
    flushes = [pid for pid, text in found if LEASES in text]
    ours = sum(pid in set(flushes) for pid, _ in found)
    note = f"{beats:.0f} beats/s (one each {BEAT_S:.0f} s), {after.connected} of {size.rest} connected"
    counted = f"{ours} statements of the writer in {took:.0f} s, {beats * took:.0f} beats meanwhile"
    name, all_there = f"{size.rest} agents at rest", after.connected == size.rest
    return [
        Row(f"{name}: CPU of web", 100 * share, "%", "of one core", 50.0, note=note, holds=all_there),
        Row(
            f"{name}: lease flushes",
            len(flushes),
            "",
            f"one each {FLUSH_S:.0f} s",
            took / FLUSH_S + 1,
            note=counted,
            holds=bool(flushes),
        ),
    ]


def _measure_soak(lab: Lab, product: RunningProduct, size: Size, progress: Callable[[str], None]) -> list[Row]:
    """Kill agents and all parts of the product at random; return a row: slope of web's memory, broken promises."""
    seed = random.randrange(1_000_000)
    progress(f"{size.soak} agents for {size.soak_s:.0f} s, they and the parts of the product are killed (seed {seed})")
    fixtures.enrol(size.soak)
    connection.close()  # PostgreSQL is going to be killed
    fleet = Fleet(lab)
    try:
        installation = Installation(lab, product, fleet, size.soak, DEVICES)
        run = ScenarioRun(installation, lambda _: None, PATIENCE_S, 0.0, size.soak_s, seed)
        lines = run_and_judge("soak", run)
    finally:
        fleet.stop()
    found = {line.promise: line for line in lines}
    memory, kills = found[soak.MEMORY], found[soak.LOST_PARTS]
    broken = [line.promise for line in lines if not line.holds]
    note = f"{memory.found}; {kills.found}; {found['none lost'].found}; BROKEN: {', '.join(broken) or 'nothing'}"
    name = f"soak, {size.soak} agents, {size.soak_s / 60:.0f} min: memory"
    return [Row(name, memory.value or 0.0, "MB/h", "slope after warm-up", BOUND_MB_H, note=note, holds=not broken)]
