"""Tests of `make bench-check`: it fails, and names the row, if a row does not hold or a promise was not measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.__main__ import main
from tests.bench.figures import Row
from tests.bench.promises import PROMISED, ROOT, RUN_FIRST, find_newest_source

Check = Callable[[], tuple[int, list[str]]]

PASSING_ROWS = [Row(name, 10.0, "ms", "idle", 20.0) for name in PROMISED]
SLOW_ROW = Row("uevent to GET /v2/devices, p50", 310.0, "ms", "idle", 300.0)
LOW_RATIO_ROW = Row("list of 1000 devices", 9.0, "ms", "json_agg passed through", 0.5, 4.0, 0.44)
LOST_HOSTS_ROW = Row("soak: memory", 1.0, "MB/h", "slope", 30.0, note="3 hosts lost", holds=False)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return a state directory with the result of a run in which every row holds."""
    write_result(tmp_path, PASSING_ROWS)
    return tmp_path


def write_result(state: Path, rows: list[Row]) -> None:
    """Write `bench.json` as a run of the bench does."""
    (state / "bench.json").write_text(json.dumps([row.as_json() for row in rows]))


@pytest.fixture
def check(state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a function that runs `tests.bench --check` over `state` and returns its exit status and lines."""
    monkeypatch.setenv("CYBORG_STATE_DIR", str(state))

    def run() -> tuple[int, list[str]]:
        status = main(["--check"])
        said = capsys.readouterr()
        return status, (said.out + said.err).splitlines()

    return run


def test_the_bench_check_passes_when_every_row_holds(state: Path, check: Check) -> None:
    assert check() == (0, [f"bench-check: all {len(PASSING_ROWS)} rows of {state}/bench.json hold"])


def test_each_row_that_does_not_hold_is_named_with_its_figure(state: Path, check: Check) -> None:
    write_result(
        state, [row for row in PASSING_ROWS if row.name != SLOW_ROW.name] + [SLOW_ROW, LOW_RATIO_ROW, LOST_HOSTS_ROW]
    )
    assert check() == (
        1,
        [
            "bench-check: uevent to GET /v2/devices, p50: 310 ms, at most 300 ms",
            "bench-check: list of 1000 devices: 44% of json_agg passed through, at least 50%",
            "bench-check: soak: memory: 1 MB/h is within its bound, but: 3 hosts lost",
        ],
    )


def test_a_promised_time_that_was_not_measured_does_not_hold(state: Path, check: Check) -> None:
    write_result(state, [row for row in PASSING_ROWS if "uevent" not in row.name])
    assert check() == (
        1,
        [f"bench-check: uevent to GET /v2/devices, {p}: not measured (group uevent)" for p in ("p50", "p99")],
    )


def test_a_result_that_is_older_than_the_product_is_not_judged(state: Path, check: Check) -> None:
    newest = find_newest_source()
    before = newest.stat().st_mtime - 1
    os.utime(state / "bench.json", (before, before))
    status, lines = check()
    assert status == 2
    assert lines == [f"bench-check: {state}/bench.json is older than {newest.relative_to(ROOT)}: {RUN_FIRST}"]


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"rows": 1}', '[{"name": "half of a row"}]'])
def test_a_missing_or_unusable_result_ends_with_one_sentence_that_says_what_to_do(
    state: Path, check: Check, content: str | None
) -> None:
    file = state / "bench.json"
    file.unlink() if content is None else file.write_text(content)
    status, lines = check()
    assert status == 2 and len(lines) == 1, lines
    assert str(file) in lines[0] and lines[0].endswith("run `make bench` first, with the same CYBORG_STATE_DIR")
