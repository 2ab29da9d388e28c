"""Test the promises of all fleet scenarios with a small fleet of simulated agents.

`tests.fleet` runs the scenarios in separate processes; here the verdict about each scenario is a test.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.fleet.scenarios import SCENARIOS
from tests.fleet.verdict import PromiseLine, table
from tests.system.product import ROOT, environment

pytestmark = pytest.mark.system
AGENTS = 150


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PromiseLine]]:
    file: Path = tmp_path_factory.mktemp("fleet") / "verdicts.json"
    words = [str(AGENTS), "--scenario", "all", "--hold", "4", "--patience", "120", "--json", str(file)]
    # Fewer concurrent handshakes than agents are allowed, so that some agents are refused with 503 in a storm.
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleet", *words, "--handshakes", "40"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment(),
    )
    assert file.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return msgspec.json.decode(file.read_bytes(), type=dict[str, list[PromiseLine]])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_promise_holds_in_each_fleet_scenario(name: str, verdicts: dict[str, list[PromiseLine]]) -> None:
    lines = verdicts[name]
    assert all(line.holds for line in lines), f"\n{table(lines)}"


def test_agents_refused_in_a_storm_got_503(verdicts: dict[str, list[PromiseLine]]) -> None:
    found = [line.found for lines in verdicts.values() for line in lines if line.promise == "only told to come back"]
    assert any("503" in one for one in found), found
