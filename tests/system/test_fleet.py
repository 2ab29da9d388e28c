"""Test the promises of all fleet scenarios with a small fleet of simulated agents.

`tests.fleet` runs the scenarios in separate processes; here the verdict about each scenario is a test. Hostile and slow
neighbours are simulated for some seconds, and how long the others wait is only reported; in the long version they are
simulated for ten minutes in each of three runs, and nobody may wait twice as long as beside quiet neighbours.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.fleet.scenarios import NEIGHBOURS, SCENARIOS
from tests.fleet.verdict import PromiseLine, table
from tests.support.long import scaled
from tests.system import environments
from tests.system.product import ROOT, environment

pytestmark = pytest.mark.system
AGENTS = 150
NEIGHBOURED_AGENTS = scaled(40, 200)
NEIGHBOURS_S = scaled(12.0, 600.0)
"""How long each of the three runs beside hostile and slow neighbours lasts."""
FACTOR = scaled(0.0, 2.0)
"""How many times as long as beside quiet neighbours the others may wait; 0: it is only reported."""


def run_fleet(file: Path, *words: str) -> dict[str, list[PromiseLine]]:
    """Run `tests.fleet` and return the verdict about each scenario, which it writes into `file`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleet", *words, "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment(),
    )
    assert file.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return msgspec.json.decode(file.read_bytes(), type=dict[str, list[PromiseLine]])


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PromiseLine]]:
    # Fewer concurrent handshakes than agents are allowed, so that some agents are refused with 503 in a storm.
    words = (str(AGENTS), "--scenario", "all", "--hold", "4", "--patience", "120", "--handshakes", "40")
    return run_fleet(tmp_path_factory.mktemp("fleet") / "verdicts.json", *words)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_promise_holds_in_each_fleet_scenario(name: str, verdicts: dict[str, list[PromiseLine]]) -> None:
    lines = verdicts[name]
    assert all(line.holds for line in lines), f"\n{table(lines)}"


def test_agents_refused_in_a_storm_got_503(verdicts: dict[str, list[PromiseLine]]) -> None:
    found = [line.found for lines in verdicts.values() for line in lines if line.promise == "only told to come back"]
    assert any("503" in one for one in found), found


def test_X5_L6_hostile_and_slow_neighbours_are_refused_and_named_and_nothing_of_others_is_lost(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    environments.wanted(pytestconfig, "keystone", "placement")
    words = (str(NEIGHBOURED_AGENTS), "--scenario", NEIGHBOURS, "--seed", "7", "--patience", "180")
    options = ("--hostile", str(NEIGHBOURS_S), "--factor", str(FACTOR), "--devices", "4")
    (lines,) = run_fleet(tmp_path / "verdict.json", *words, *options).values()
    print(table(lines))
    assert all(line.holds for line in lines), f"\n{table(lines)}"
