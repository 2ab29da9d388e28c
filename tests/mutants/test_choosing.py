"""Tests that the mutation runner chooses the right tests for a mutant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import choosing
from tests.mutants.choosing import Choice, Recording
from tests.mutants.mutant import Mutant

SOURCE = """LIMIT = 3

def within(value):
    if value > 9:
        return 0
    return min(value, LIMIT)
"""
PATH = "drivers/sample.py"
OWN = "tests/accelerators/api/v2/test_requests.py::test_of_the_area"
FAST, SLOW, FAILED = (f"tests/x/test_{name}.py::test_{name}" for name in ("fast", "slow", "failed"))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Return a recording: FAST executes the last line of `within`, SLOW the branch, FAILED both, OWN none of them."""
    (tmp_path / "drivers").mkdir()
    (tmp_path / PATH).write_text(SOURCE)
    monkeypatch.setattr(choosing, "ROOT", tmp_path)
    choosing._read_lines.cache_clear()
    choosing._parse_statements.cache_clear()
    found = Recording({PATH: [1, 3]})
    lines = {FAST: [4, 6], SLOW: [4, 5], FAILED: [4, 5, 6]}
    found.add(
        {
            "failed": [FAILED],  # type: ignore[dict-item]
            "skipped": [],  # type: ignore[dict-item]
            "seconds": {FAST: 0.1, SLOW: 2.0, FAILED: 0.1, OWN: 0.5},  # type: ignore[dict-item]
            "lines": {test: {PATH: numbers} for test, numbers in lines.items()},
        }
    )
    return found


def choose(recorded: Recording, line: int) -> Choice:
    """Choose tests for a mutant of the area `binding` in this line."""
    return recorded.choose(Mutant("binding", PATH, line, line, "compare", 0, 0))


@pytest.mark.parametrize(
    ("line", "tests"),
    [(6, (FAST, OWN)), (5, (OWN, SLOW)), (4, (FAST, OWN, SLOW))],
    ids=["last line", "branch", "condition"],
)
def test_it_runs_the_tests_of_the_line_and_of_the_area_fastest_first_and_none_that_failed(
    recorded: Recording, line: int, tests: tuple[str, ...]
) -> None:
    assert choose(recorded, line) == Choice(tests, cold=False, left_out=0)


def test_a_constant_is_tried_in_a_new_process_by_the_tests_that_execute_its_use(recorded: Recording) -> None:
    assert choose(recorded, 1) == Choice((FAST, OWN), cold=True, left_out=0)


def test_it_counts_the_tests_that_it_leaves_out(recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "MAX_S", 1.0)
    assert choose(recorded, 4) == Choice((FAST, OWN), cold=False, left_out=1)


def test_the_shortest_measured_time_counts(recorded: Recording) -> None:
    recorded.add_times({SLOW: 0.05, FAST: 9.0})
    assert choose(recorded, 4).tests == (SLOW, FAST, OWN)
