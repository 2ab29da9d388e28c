"""Rows of the start-up: from the command of `make up` to /healthz, with an empty and with a used state directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from cyborgweb.database.postgres import Postgres
from tests.bench.figures import Row, median
from tests.bench.product import CONSOLE, get, start_supervisor, stop_supervisor, wait_for
from tests.bench.promises import FIRST_START, SECOND_START

FIRST_S, SECOND_S = 8.0, 5.0
PATIENCE_S = 180.0


def rows(starts: int, progress: Callable[[str], None]) -> list[Row]:
    """Measure `starts` first starts and as many second ones; return a row with the median of each."""
    progress(f"{starts} first starts and {starts} second ones, each to /healthz")
    first, second = list[float](), list[float]()
    for _ in range(starts):
        state = Path(tempfile.mkdtemp(prefix="cyborg-start-"))
        try:
            first.append(_time_start(state))
            second.append(_time_start(state))
        finally:
            shutil.rmtree(Postgres(state / "postgres", "").socket, ignore_errors=True)
            shutil.rmtree(state, ignore_errors=True)
    return [
        _make_row(FIRST_START, "empty state directory", first, FIRST_S),
        _make_row(SECOND_START, "the same", second, SECOND_S),
    ]


def _make_row(name: str, against: str, times: list[float], bound: float) -> Row:
    note = (
        f"python -m cyborgweb.server.supervisor, as `make up` runs it; of {len(times)}, the longest {max(times):.1f} s"
    )
    return Row(name, median(times), "s", against, bound, note=note)


def _time_start(state: Path) -> float:
    """Start the product, wait until /healthz answers with 200, and stop it; return the seconds until then."""
    log_file = state / "serve.log"
    began = monotonic()
    process = start_supervisor(log_file, {"CYBORG_STATE_DIR": str(state)})
    try:
        port = int(
            wait_for(lambda: CONSOLE.search(log_file.read_text()), "its console's address", process, PATIENCE_S)[1]
        )
        wait_for(lambda: _is_healthy(port), "/healthz", process, PATIENCE_S)
        return monotonic() - began
    finally:
        stop_supervisor(process)


def _is_healthy(port: int) -> bool:
    try:
        return get(port, "/healthz")[0] == 200
    except OSError:
        return False
