"""Rows of the whole product, started by its one command: the time until a report is visible, and a storm of agents.

The ceiling of the storm is the bare server: the same client gets a challenge, signs, upgrades and waits for the
Welcome, as it does with the product. The product also checks the signature, looks the agent up, and takes the reports
that arrive meanwhile. All agents start at once; none waits for another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from django.db import connection

from tests.bench import fixtures
from tests.bench.figures import Row, cpu_s, median, rss_kb
from tests.bench.lab import SERVER_CORE, Generator, Lab, run_server
from tests.bench.product import RunningProduct, api_token, get, pin_process, wait_for
from tests.bench.promises import REPORT
from tests.bench.remote_calls import MeasurementError

DEVICES = 8
WARM_UP_AGENTS = 50
COUNT_DEVICES = """
SELECT count(*) FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id WHERE h.name LIKE 'bench-%'
"""


@dataclass(frozen=True)
class Size:
    """Number of samples of the first rows, of agents in the storm, and of storms."""

    samples: int
    agents: int
    rounds: int


def measure_visibility(
    product: RunningProduct, generator: Generator, size: Size, progress: Callable[[str], None]
) -> list[Row]:
    """Return two rows, p50 and p99 of the time from a report's Ack until GET /v2/devices shows it."""
    progress(f"from a report's Ack to GET /v2/devices, {size.samples} times")
    fixtures.enrol(1)
    token = api_token()
    done = generator.ask("measure_visibility", port=product.port, token=token, samples=size.samples)
    times = done["times_ms"]
    note = f"asked again 2 ms after each answer; one such GET alone takes {done['get_ms']:.1f} ms"
    last = times[min(len(times) - 1, len(times) * 99 // 100)]
    against = "idle, from its Ack"
    return [
        Row(f"{REPORT}, p50", median(times), "ms", against, 60.0, note=note),
        Row(f"{REPORT}, p99", last, "ms", against, 150.0, note=f"of {len(times)}; the longest {times[-1]:.0f} ms"),
    ]


def measure_storm(
    lab: Lab, product: RunningProduct, generator: Generator, size: Size, progress: Callable[[str], None]
) -> list[Row]:
    """Return two rows: the rate at which agents connect, and the memory of one connection."""
    progress(f"{size.agents} agents connect and report at once, {size.rounds} times")
    fixtures.enrol(size.agents)
    web = product.child("cyborgweb.server.web_server")
    pin_process(web, SERVER_CORE)
    token = api_token()
    turns: list[dict[str, float]] = []
    with run_server(lab, "bare") as bare:
        generator.ask("storm", group="warm", port=bare.port, count=WARM_UP_AGENTS, devices=0)
        generator.ask("close", group="warm")
        _run_storm_until_stored(product, generator, WARM_UP_AGENTS)
        generator.ask("close", group="storm")
        for _ in range(size.rounds):
            before = cpu_s(bare.pid)
            done = generator.ask("storm", group="bare", port=bare.port, count=size.agents, devices=0)
            turn = {"bare_cpu": cpu_s(bare.pid) - before, "bare_s": done["connected_s"]}
            generator.ask("close", group="bare")
            sleep(0.5)
            turns.append(turn | _run_turn(product, web, token, generator, size.agents))
    return [_make_rate_row(turns, size.agents), _make_memory_row(turns)]


def _run_turn(product: RunningProduct, web: int, token: str, generator: Generator, agents: int) -> dict[str, float]:
    fixtures.empty_inventory()
    memory, before = rss_kb(web), cpu_s(web)
    began = monotonic()
    done = _run_storm_until_stored(product, generator, agents)
    turn = {"seen_s": monotonic() - began, "cpu": cpu_s(web) - before}
    sleep(0.5)
    turn["kb"] = (rss_kb(web) - memory) / agents
    status, body = get(product.port, "/v2/devices", token)
    if status != 200:
        raise MeasurementError(f"GET /v2/devices: {status} {body[:200]!r}")
    turn["shown"] = sum(str(one["hostname"]).startswith("bench-") for one in json.loads(body)["devices"])
    turn["lost"] = generator.ask("close", group="storm")["lost"]
    return turn | {"connected_s": done["connected_s"], "acked_s": done["acked_s"], "refused": done["refused"]}


def _run_storm_until_stored(product: RunningProduct, generator: Generator, agents: int) -> dict[str, Any]:
    """Run a storm and wait until every device is in the tables; return the results of the storm."""
    done = generator.ask("storm", group="storm", port=product.port, count=agents, devices=DEVICES)
    done["refused"] = sum(done["refused"].values())
    wait_for(lambda: _count_devices() >= agents * DEVICES, "every device in the tables")
    return done


def _count_devices() -> int:
    with connection.cursor() as cursor:
        cursor.execute(COUNT_DEVICES)
        return int(cursor.fetchone()[0])


def _get_median(turns: list[dict[str, float]], name: str) -> float:
    return median([turn[name] for turn in turns])


def _make_rate_row(turns: list[dict[str, float]], agents: int) -> Row:
    later, lost = (sum(turn[name] for turn in turns) for name in ("refused", "lost"))
    shown = min(turn["shown"] for turn in turns)
    bare_us, cpu_us = (_get_median(turns, name) / agents * 1e6 for name in ("bare_cpu", "cpu"))
    note = (
        f"all acknowledged {_get_median(turns, 'acked_s'):.2f} s, in the tables {_get_median(turns, 'seen_s'):.2f} s"
        f" after the start; {later:.0f} told to come back, {lost:.0f} lost;"
        f" {shown:.0f} of {agents * DEVICES} in GET /v2/devices;"
        f" CPU {cpu_us:.0f} with the report against {bare_us:.0f} µs"
    )
    return Row(
        f"{agents} agents connect and report at once",
        agents / _get_median(turns, "connected_s"),
        "connects/s",
        "bare connects, same client",
        0.60,
        agents / _get_median(turns, "bare_s"),
        median([turn["bare_s"] / turn["connected_s"] for turn in turns]),
        cpu_us,
        note,
        lost == 0 and shown == agents * DEVICES,
    )


def _make_memory_row(turns: list[dict[str, float]]) -> Row:
    note = "RSS of the web process after the first storm less before it, by connection; buffers of the reports included"
    return Row("one idle connection", turns[0]["kb"], "KB", "memory of web", 30.0, note=note)
