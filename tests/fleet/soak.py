"""The soak: agents and parts of the product are killed for a long time; nothing may be lost, memory must stay flat."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.bench.figures import anonymous_kb
from tests.fleet import verdict
from tests.fleet.kills import FIND, PARTS, Killer
from tests.fleet.memory_trend import Sample, judge_memory
from tests.fleet.verdict import PromiseLine

if TYPE_CHECKING:
    from tests.fleet.scenarios import ScenarioRun

POLL_S = 0.5
CHANGE_EVERY_S = 60.0
"""How often the content of each host changes, on average."""
MIN_KILLS_PER_S = 30.0
"""The smallest number of agents killed each second. Each life of an agent is one connection of the web process, whose
memory is flat only after a thousand connections (measured)."""
AGENT_LIFETIME_S = 50.0
"""How long each agent of a large fleet lives, on average."""
PAUSE_S = 8.0
"""Mean pause between two kills of parts of the product."""
EVERYTHING_SHARE = 1 / 4
"""Fraction of the time in which the web process is killed too. In the rest it is not, and its memory is judged."""
MEMORY, LOST_PARTS = "memory does not grow", "killed in turn"


def soak(run: ScenarioRun) -> list[PromiseLine]:
    """Kill agents all the time, and the parts of the product in turn; judge the kills and web's memory."""
    run.installation.power_on()
    run.wait_until_settled()
    killer, samples = Killer(run.installation, run.seed, run.patience_s), list[Sample]()

    def watch() -> None:
        run.show(run.installation.take_snapshot())
        time.sleep(POLL_S)

    def measure() -> None:
        watch()
        if (sample := _sample_web(run)) is not None:
            samples.append(sample)

    _begin_unrest(run)
    killer.kill_in_turn(PARTS, run.soak_s * EVERYTHING_SHARE, PAUSE_S, watch)
    run.ask("set_unrest")
    run.wait_until_settled()
    _begin_unrest(run)
    others = [part for part in PARTS if part != "web"]
    killer.kill_in_turn(others, run.soak_s * (1 - EVERYTHING_SHARE), PAUSE_S, measure)
    run.ask("set_unrest")
    for part in PARTS:
        killer.wait_for(part, watch)
    _wait_until_nothing_is_stuck(run)
    judgement = judge_memory(samples)
    slope = judgement.trend.mb_per_hour if judgement.trend else None
    return [judge_kills(killer), PromiseLine(MEMORY, judgement.text, judgement.holds, slope)]


def _begin_unrest(run: ScenarioRun) -> None:
    count = run.installation.count
    kills_per_s = max(MIN_KILLS_PER_S, count / AGENT_LIFETIME_S)
    run.ask("set_unrest", changes_per_s=count / CHANGE_EVERY_S, kills_per_s=kills_per_s)


def _sample_web(run: ScenarioRun) -> Sample | None:
    """Measure the memory of the web process; return None while there is no such process."""
    for pid in FIND["web"](run.installation):
        try:
            return Sample(time.monotonic(), anonymous_kb(pid), pid)
        except OSError:
            return None
    return None


def _wait_until_nothing_is_stuck(run: ScenarioRun) -> None:
    """Wait until no job waits; after a kill of a worker the supervisor replaces its cluster (CYBORG_TICK_STALL_S)."""
    end = time.monotonic() + run.patience_s
    run.wait_until_settled()
    while time.monotonic() < end:
        stuck = run.installation.query(verdict.STUCK)
        if stuck and not any(stuck[0]):
            return
        run.show(run.installation.take_snapshot())
        time.sleep(POLL_S)


def judge_kills(killer: Killer) -> PromiseLine:
    """Check that every part was killed at least once and came back each time."""
    counts = ", ".join(f"{killer.killed[part]} {part}" for part in PARTS)
    away = f"; did not come back: {', '.join(killer.missing)}" if killer.missing else ""
    holds = not killer.missing and all(killer.killed[part] for part in PARTS)
    return PromiseLine(LOST_PARTS, f"seed {killer.seed}: {counts}{away}", holds)
