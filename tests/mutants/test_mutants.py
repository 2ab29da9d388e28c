"""Tests of parts of `make mutants`: replacing code, results that survive a kill, and the table of results."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.mutants import figures, state, swapping, worker

SOURCE = """
LIMIT = 3

def doubled(function):
    def wrapper(value):
        return 2 * function(value)
    return wrapper

@doubled
def within(value, most=LIMIT):
    return [each for each in range(value) if each < most]

class Door:
    def opens(self):
        return (lambda: True)()
"""


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Write SOURCE to a file and import it as a module."""
    (tmp_path / "swapped_sample.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("swapped_sample")
    del sys.modules["swapped_sample"]


def replace_code(module: ModuleType, old: str, new: str) -> int:
    """Replace the code of the imported module; return the number of changed functions."""
    path = Path(str(module.__file__))
    gc.collect()
    functions = swapping.find_live_functions(path.parent)[str(path)]
    assert swapping.can_swap(path, SOURCE, SOURCE.replace(old, new))
    return swapping.swap(path, SOURCE, SOURCE.replace(old, new), functions)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("each < most", "each <= most", lambda m: m.within(9) == [0, 1, 2, 3] * 2),
        ("2 * function", "3 * function", lambda m: m.within(1) == [0] * 3),
        ("lambda: True", "lambda: None", lambda m: m.Door().opens() is None),
    ],
    ids=["behind a decorator", "inside a closure", "a lambda of a method"],
)
def test_a_change_inside_a_function_reaches_the_imported_module(
    sample: ModuleType, old: str, new: str, changed: Any
) -> None:
    assert not changed(sample)
    assert replace_code(sample, old, new)
    assert changed(sample)


@pytest.mark.parametrize(("old", "new"), [("LIMIT = 3", "LIMIT = 4"), ("most=LIMIT", "most=None"), ("@doubled\n", "")])
def test_a_change_of_code_that_runs_at_import_needs_a_new_process(tmp_path: Path, old: str, new: str) -> None:
    assert not swapping.can_swap(tmp_path / "any.py", SOURCE, SOURCE.replace(old, new))


def test_results_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FOLDER", tmp_path)
    lines = state.Lines("results.jsonl")
    lines.append({"key": "first"})
    with lines.path.open("a") as file:
        file.write('{"key": "cut of')
    assert [each["key"] for each in lines] == ["first"]
    lines.append({"key": "second"})
    assert [json.loads(line)["key"] for line in lines.path.read_text().splitlines()] == ["first", "second"]


def test_equivalent_mutants_do_not_count_in_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_equivalents", lambda: {("a.py", ("-x = 1", "+x = 2")): "x is never read"})
    one = {"area": "groups", "path": "a.py", "line": 1, "left_out": 0, "tests": 3, "diff": ["-  x = 1", "+  x = 2"]}
    others = [one | {"outcome": outcome, "diff": ["-y"]} for outcome in ("killed", "killed", "timeout", "survived")]
    results = [one | {"outcome": "survived"}, *others]
    run = figures.Run(seed=7, commit="abc", sample=5, all_counts={"groups": 90})
    assert "| groups | 90 | 5 | 2 | 1 | 1 | 1 | 75 % |" in figures.table(run, results)
    assert "### Survived: 1" in figures.survivors(results)
    assert "x is never read" in figures.survivors(results)


def test_a_test_of_the_same_top_folder_is_no_test_of_another_folder() -> None:
    """With a test of another sub-package as the next item, pytest would keep the fixtures of their common package."""
    folder = Path("tests").absolute()
    assert worker.get_top_folder(folder / "accelerators/admin/test_a.py") == "accelerators"
    assert worker.get_top_folder(folder / "accelerators/test_b.py") == "accelerators"
    assert worker.get_top_folder(folder / "test_c.py") == "test_c.py"
