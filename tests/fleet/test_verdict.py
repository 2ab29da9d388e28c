"""Tests of the verdict on a fleet: a lost report, a refusal other than "busy", growing memory or a part that was not
killed breaks a promise."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from agents import wire
from agents.host.backoff import ConnectionTiming, PendingAcks
from cyborgweb.settings.keys import Keys
from tests.fleet import latencies, verdict
from tests.fleet.__main__ import HELP_EPILOG
from tests.fleet.hostile import NEW_DEVICES, VARIANTS, make_report_parts
from tests.fleet.hosts import FleetCounters, SimulatedAgent, count_open_files
from tests.fleet.installation import FleetSnapshot
from tests.fleet.kills import FIND, PARTS, Killer, draw_order
from tests.fleet.memory_trend import BLOCKS, BOUND_MB_H, LEAST_BLOCKS, Sample, _reduce_to_blocks, judge_memory
from tests.fleet.soak import judge_kills


class SilentPeer:
    """A stub of a peer."""

    def send(self, text: str) -> None:
        """Drop the message."""


class FakeInstallation:
    """A fake installation with the given tables and one host."""

    count = 1
    extra_memory_kb = 0

    def __init__(self, host: SimulatedAgent, *stored: tuple[str, str, int, str]) -> None:
        self.stored, self.states = list(stored), [list(host.state())]
        self.fleet, self.snapshots = self, [FleetSnapshot(0.0, connected=1, counts={}, refused={})]

    def ask(self, do: str) -> dict[str, Any]:
        """Return the states, as the fleet does."""
        return {do: self.states}

    def query(self, statement: str) -> list[Any]:
        """Return the stored hosts, or that nothing is stuck."""
        return self.stored if statement is verdict.STORED else [(0, 0, 0)]


def send_report(host: SimulatedAgent) -> tuple[str, str]:
    """Let the host send a report; return the report's hash and model."""
    host._pending = PendingAcks(8.0, ConnectionTiming())
    host._send_report(SilentPeer(), time.monotonic())  # type: ignore[arg-type]
    return host._sent_since[-1].content, host._sent_since[-1].model


def acknowledge(host: SimulatedAgent, seq: int) -> None:
    """Let the host receive an Ack of the report `seq`."""

    async def hear() -> None:
        host._handle_message(SilentPeer(), wire.encode_message(wire.Ack(seq, "Report")).encode())  # type: ignore[arg-type]

    asyncio.run(hear())


@pytest.fixture
def host() -> SimulatedAgent:
    """Return an agent with two devices that has not sent a report yet."""
    return SimulatedAgent(7, 2, FleetCounters())


def is_lost(host: SimulatedAgent, content: str, model: str, devices: int = 2) -> bool:
    """Return whether the verdict is that the host is lost if this is in the tables."""
    return bool(verdict.find_lost_hosts(FakeInstallation(host, (host.state()[0], content, devices, model))))  # type: ignore[arg-type]


def test_a_host_is_lost_unless_its_tables_match_an_acknowledged_or_later_report(host: SimulatedAgent) -> None:
    first, model = send_report(host)
    assert host.state()[1:5] == (0, 0, "", "") and not is_lost(host, "", "", 0), "nothing was promised"
    acknowledge(host, 1)
    assert host.state()[2:] == (1, first, "g0", 2, [])
    assert not is_lost(host, first, model) and is_lost(host, first, "g7") and is_lost(host, first, model, 1)
    host.failing = True
    host.change()
    second, none = send_report(host)
    host.failing = False
    assert host.state()[2:] == (1, first, "g0", 2, [(second, none)]) and none == ""
    assert not is_lost(host, first, model) and not is_lost(host, second, model), "either may be stored"
    assert is_lost(host, "another", model)
    acknowledge(host, 2)
    assert host.state()[2:] == (2, second, "", 2, [])
    assert not is_lost(host, second, model) and is_lost(host, first, model), "settled"


@pytest.mark.parametrize(
    ("what", "holds"),
    [
        *((word, True) for word in ("503", "busy", "closed", "silence", "ConnectionResetError", "TimeoutError")),
        *((word, False) for word in ("403", "500", "clone", "revoked", "malformed", "superseded", "KeyError")),
    ],
)
def test_any_refusal_other_than_busy_breaks_the_promise(host: SimulatedAgent, what: str, holds: bool) -> None:
    installation = FakeInstallation(host)
    installation.snapshots[-1].refused[what] = 2
    lines = verdict.judge(installation, True, 0.0, FleetSnapshot(0.0), [])  # type: ignore[arg-type]
    assert {line.promise: line.holds for line in lines}["only told to come back"] is holds
    assert installation.snapshots[-1].sent_away == (2 if what == "503" else 0)


def test_the_help_text_names_the_number_of_open_files_that_are_needed() -> None:
    assert count_open_files(1000) == 1700 and "1.5 N + 200 here" in HELP_EPILOG


def make_samples(mb_per_hour: float, seconds: int = 600, noise_kb: float = 300.0, seed: int = 3) -> list[Sample]:
    """Return one sample per second of a process that fills its caches in three minutes and also grows steadily."""
    chance = random.Random(seed)
    return [
        Sample(at, 80_000 + 20_000 * min(1.0, at / 180) + mb_per_hour * 1024 * at / 3600 + chance.gauss(0, noise_kb))
        for at in range(seconds)
    ]


def test_a_steady_growth_of_a_few_kb_per_connection_is_found() -> None:
    """The growth is 4 KB for each of 5 connections a second: only 12 % of 100 MB in ten minutes."""
    growth = 4 * 5 * 3600 / 1024
    found = judge_memory(make_samples(growth))
    assert not found.holds and "grows by" in found.text, found.text
    assert found.trend is not None
    assert found.trend.low <= growth <= found.trend.high
    assert found.trend.mb_per_hour == pytest.approx(growth, rel=0.1)


def test_a_growth_that_may_be_more_than_the_bound_does_not_pass() -> None:
    """The estimate is below the bound, and the interval is narrow, but it reaches beyond the bound."""
    found = judge_memory(make_samples(0.0), bound=0.1)
    assert found.trend is not None
    almost = (found.trend.mb_per_hour + found.trend.high) / 2
    assert found.trend.precision * 2 < BOUND_MB_H
    found = judge_memory(make_samples(BOUND_MB_H - almost))
    assert found.trend is not None and found.trend.mb_per_hour < BOUND_MB_H < found.trend.high
    assert not found.holds and "soak it longer" in found.text, found.text


@pytest.mark.parametrize("samples", [8, 24, 25, 47, 48, 71, 600])
def test_samples_are_reduced_to_a_limited_number_of_blocks(samples: int) -> None:
    points = _reduce_to_blocks(make_samples(0.0, seconds=samples))
    assert LEAST_BLOCKS <= len(points) <= BLOCKS


@pytest.mark.parametrize("seed", range(5))
def test_a_plateau_after_warm_up_passes_and_shows_its_confidence_interval(seed: int) -> None:
    found = judge_memory(make_samples(0.0, seed=seed))
    assert found.holds and found.trend is not None, found.text
    assert abs(found.trend.mb_per_hour) < found.trend.precision * 2 < BOUND_MB_H
    assert 0.0 < found.trend.residual_mb < 0.3
    assert "MB/h (95 %: " in found.text and "residual 0." in found.text


def test_one_step_to_a_new_plateau_is_not_growth() -> None:
    flat = make_samples(0.0, seconds=1800)
    stepped = [replace(one, kb=one.kb + 4000 * (one.at_s > 1350)) for one in flat]
    assert judge_memory(stepped).holds, judge_memory(stepped).text


def test_noisy_too_few_or_replaced_samples_do_not_pass() -> None:
    noisy = judge_memory(make_samples(0.0, noise_kb=20_000.0))
    assert not noisy.holds and "soak it longer" in noisy.text, noisy.text
    few = judge_memory(make_samples(0.0, seconds=9))
    assert not few.holds and few.trend is None and "9 samples are too few" in few.text
    replaced = judge_memory([*make_samples(0.0), Sample(601.0, 80_000, pid=2)])
    assert not replaced.holds and "replaced" in replaced.text


def test_every_part_is_killed_once_in_every_round_and_a_seed_repeats_the_order() -> None:
    first, again, other = (list(islice(draw_order(PARTS, random.Random(seed)), 70)) for seed in (5, 5, 6))
    assert first == again != other
    for begin in range(0, 70, len(PARTS)):
        assert sorted(first[begin : begin + len(PARTS)]) == sorted(PARTS)


def test_a_process_that_ended_before_the_kill_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen(["sleep", "60"]) as running:
        looks = iter([[ended.pid], [running.pid]])
        monkeypatch.setitem(FIND, "web", lambda installation: next(looks))
        killer = Killer(None, 42, 60.0)  # type: ignore[arg-type]
        killer.kill_in_turn(["web"], 0.0, 0.0, lambda: None)
        assert running.wait() == -signal.SIGKILL
    assert killer.killed == {"web": 1} and not killer.missing


def test_a_part_that_was_not_killed_or_did_not_come_back_breaks_the_promise() -> None:
    killer = Killer(None, 42, 1.0)  # type: ignore[arg-type]
    killer.killed.update(PARTS)
    assert judge_kills(killer).holds and "seed 42: 1 web, 1 ingest cluster" in judge_kills(killer).found
    killer.missing.append("worker")
    assert not judge_kills(killer).holds and judge_kills(killer).found.endswith("did not come back: worker")
    killer.missing.clear()
    del killer.killed["web"]
    assert not judge_kills(killer).holds


def test_percentiles_are_measured_values_and_nothing_measured_is_not_quick() -> None:
    hundred = [float(n) for n in range(1, 101)]
    assert [latencies.percentile(hundred, percent) for percent in (0, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert latencies.percentile([3.0, 1.0], 99) == 3.0
    assert latencies.percentile([], 50) == latencies.NEVER


def test_a_report_is_visible_with_the_first_later_report_of_its_own_host() -> None:
    timings = [("a", 1, 1, 10.0, 10.5), ("a", 1, 2, 11.0, None), ("b", 1, 1, 10.0, 10.1), ("a", 2, 1, 12.0, 12.5)]
    sightings = [("a", 1, 0, 9.0), ("b", 1, 7, 10.25), ("a", 1, 2, 13.0), ("a", 2, 0, 14.0)]
    found = latencies.compute_latencies(timings, sightings, [0.25], failed_binds=1)
    assert found.visible == [3.0, 2.0, 0.25, latencies.NEVER]
    assert found.acknowledged == [0.5, latencies.NEVER, pytest.approx(0.1), 0.5]
    assert found.bound == [0.25, latencies.NEVER]


def make_latencies(visible: float, acknowledged: float = 0.1, bound: float = 0.2) -> latencies.Latencies:
    """Return the latencies of a run in which everything took the same time."""
    return latencies.Latencies(*([seconds] * 200 for seconds in (visible, acknowledged, bound)))


def test_each_p99_is_compared_with_that_of_each_control_run() -> None:
    controls = {"quick": make_latencies(0.5), "slow": make_latencies(1.0)}
    lines = latencies.compare_runs(make_latencies(1.1, 0.2, 0.41), controls, 2.0)
    assert {line.promise: line.holds for line in lines} == {
        "report to visible, quick": False,
        "acknowledgement, quick": True,
        "bind, quick": False,
        "report to visible, slow": True,
        "acknowledgement, slow": True,
        "bind, slow": False,
    }
    assert lines[0].value == pytest.approx(2.2) and "control p50 500 ms, p99 500 ms of 200: 2.2 times" in lines[0].found
    assert all(line.holds for line in latencies.compare_runs(make_latencies(9.0), controls, None)), "only reported"


def test_a_run_or_a_control_run_without_an_end_breaks_the_promise() -> None:
    never = make_latencies(latencies.NEVER, latencies.NEVER, latencies.NEVER)
    for found, control in ((never, make_latencies(1.0)), (make_latencies(1.0), never), (never, never)):
        assert not any(line.holds for line in latencies.compare_runs(found, {"c": control}, 2.0))


def test_a_culprit_that_a_page_does_not_name_breaks_the_promise() -> None:
    wanted = {"host": [("/", "cmp1"), ("/", "fault")], "client": [("/c", "192.0.2.1")]}
    assert not latencies.find_unnamed({"/": "fault of cmp1", "/c": "192.0.2.1"}, wanted)
    missing = latencies.find_unnamed({"/": "fault of cmp2"}, wanted)
    assert missing == {"host": "'cmp1' on /", "client": "'192.0.2.1' on /c"}
    lines = latencies.judge_names(missing, [*wanted, "receiver"])
    assert [line.holds for line in lines] == [False, False, True]


def test_a_hostile_request_that_was_served_or_an_attack_that_never_ran_breaks_the_promise() -> None:
    refused = {attack: dict.fromkeys(labels or ["closed"], 1) for attack, labels in latencies.EXPECTED.items()}
    rates = dict.fromkeys(refused, 1.0)
    assert [line.holds for line in latencies.judge_refusals(refused, rates, 10, 10)] == [True, True]
    assert [line.holds for line in latencies.judge_refusals(refused, rates, 11, 10)] == [True, False]
    for attack, outcome in (("forged", "101"), ("markers", "200, unknown 400"), ("subscribe", "crafted 201")):
        (line, _) = latencies.judge_refusals(refused | {attack: {outcome: 1}}, rates, 0, 10)
        assert not line.holds and outcome in line.found
    (line, _) = latencies.judge_refusals(refused | {"forged": {}}, rates, 0, 10)
    assert line.holds, "its turns have begun and not ended"
    (line, _) = latencies.judge_refusals(refused, rates | {"forged": 0.0}, 0, 10)
    assert not line.holds and "no turn of forged" in line.found


def test_hostile_reports_name_more_devices_than_are_stored_and_another_hosts_provider() -> None:
    keys = set()
    for variant in (0, VARIANTS - 1):
        head, middle, tail = make_report_parts(variant, "bench-00007")
        report = wire.decode_from_agent(f"{head}7{middle}{7:040x}{tail}")
        assert isinstance(report, wire.Report) and report.urgent
        own, stolen = report.drivers
        keys |= {device.key for device in own.devices}
        assert stolen.devices[0].deployables[0].name.startswith("bench-00007_")
    assert len(keys) == 2 * NEW_DEVICES and Keys().max_devices_per_host < VARIANTS * NEW_DEVICES
