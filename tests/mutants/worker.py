"""The pytest plugin that runs mutants: tests are imported and collected once, then each job runs in a fork.

`tests.mutants.workers` starts it with a pipe for jobs and one for answers, both with JSON lines. Jobs:
`{"record": [ids]}` runs tests under coverage; `{"mutant": {...}, "tests": [ids], …}` runs tests until one fails.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from drivers.isolation.process import die_with_parent
from tests.mutants import swapping
from tests.mutants.areas import PRODUCT
from tests.mutants.template import Template

TREE = Path.cwd()
SUSPENDED_S = 5.0
"""This process wakes up every second; after a gap that is longer than this it was suspended."""


def _create_coverage() -> Any:
    import coverage

    files = [str(TREE / room / "*") for room in PRODUCT]
    return coverage.Coverage(data_file=None, config_file=False, include=files)


_at_import = _create_coverage() if os.environ.pop("MUTANTS_TRACE_IMPORT", "") else None
if _at_import:
    _at_import.start()


class Watcher:
    """Records the time of each test, failures and skips, and (with `cover`) the lines that each executed."""

    def __init__(self, cover: Any = None, limits: dict[str, float] | None = None) -> None:
        self.cover = cover
        self.limits = limits or {}
        self.failed: list[str] = []
        self.skipped: set[str] = set()
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the time of the three phases of a test, and record failures and skips."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        if report.skipped:
            self.skipped.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Switch coverage to the test's context; set an alarm that ends the process if the test takes too long."""
        signal.setitimer(signal.ITIMER_REAL, self.limits.get(item.nodeid, 0))
        if self.cover:
            self.cover.switch_context(item.nodeid)
        return (yield)


def run_items(session: pytest.Session, ids: list[str], watcher: Watcher, *, until_failure: bool) -> None:
    """Run tests as pytest's loop does, but without teardown of session fixtures, because the process ends anyway."""
    items = {item.nodeid: item for item in session.items}
    session.config.pluginmanager.register(watcher)
    wanted = [items[each] for each in ids if each in items]
    for number, item in enumerate(wanted):
        following = wanted[number + 1] if number + 1 < len(wanted) else _find_item_in_other_folder(session, item)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        if until_failure and watcher.failed:
            return


def _find_item_in_other_folder(session: pytest.Session, item: pytest.Item) -> pytest.Item | None:
    """Return a test of another folder directly in `tests`.

    If it is the next item, pytest tears down all fixtures of the sub-folders. It keeps only fixtures that every other
    test needs, too; otherwise the next test would fail with "previous item was not torn down properly".
    """
    folder = get_top_folder(item.path)
    return next((each for each in session.items if get_top_folder(each.path) != folder), None)


def get_top_folder(path: Path) -> str:
    """Return the first part of a test's path below `tests`: `agents` for tests/agents/host/test_main.py."""
    return path.relative_to(TREE / "tests").parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Serve jobs until the pipe closes."""
    jobs = os.fdopen(int(os.environ.pop("MUTANTS_JOBS")), "r")
    answers = os.fdopen(int(os.environ.pop("MUTANTS_ANSWERS")), "w", buffering=1)
    imported = _collect_lines(_at_import).get("", {}) if _at_import else None
    _warm_up(session)
    _template.keep()
    gc.collect()
    functions = swapping.find_live_functions(TREE)
    gc.freeze()
    ready = {"ready": [item.nodeid for item in session.items], "import_lines": imported}
    print(json.dumps(ready), file=answers)
    for line in jobs:
        job = json.loads(line)
        began = time.monotonic()
        answer = _record_lines(session, job) if "record" in job else _try_mutant(session, job, functions)
        print(json.dumps(answer | {"took_s": round(time.monotonic() - began, 2)}), file=answers)
    return True


def _warm_up(session: pytest.Session) -> None:
    """Run one test with a database, so that the session's fixtures exist; then close all connections."""
    first = next(item for item in session.items if item.get_closest_marker("django_db"))
    watcher = Watcher()
    session.config.pluginmanager.register(watcher)
    first.ihook.pytest_runtest_protocol(item=first, nextitem=_find_item_in_other_folder(session, first))
    session.config.pluginmanager.unregister(watcher)
    assert not watcher.failed, f"{first.nodeid} fails without a mutant"
    from django.db import connections

    connections.close_all()


def _collect_lines(cover: Any) -> dict[str, dict[str, list[int]]]:
    """Return the executed lines: context → file → lines."""
    cover.stop()
    data, lines = cover.get_data(), dict[str, dict[str, list[int]]]()
    for path in data.measured_files():
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                lines.setdefault(context, {}).setdefault(str(Path(path).relative_to(TREE)), []).append(line)
    return lines


def _record_lines(session: pytest.Session, job: dict[str, Any]) -> dict[str, Any]:
    def child() -> dict[str, Any]:
        cover = _create_coverage()
        watcher = Watcher(cover)
        cover.start()
        run_items(session, job["record"], watcher, until_failure=False)
        lines = _collect_lines(cover)
        failed = watcher.failed
        return {"seconds": watcher.seconds, "failed": failed, "skipped": sorted(watcher.skipped), "lines": lines}

    return run_in_fork(child, job["limit_s"])


def _try_mutant(session: pytest.Session, job: dict[str, Any], functions: dict[str, list[Any]]) -> dict[str, Any]:
    """Plant the mutant and run its tests. A failure counts only if the test passes without the mutant."""
    mutant = job["mutant"]
    path = TREE / mutant["path"]
    old, tests, unsteady = path.read_text(), list(job["tests"]), []
    stat = path.stat()
    cold = bool(mutant["cold"]) or not swapping.can_swap(path, old, mutant["source"])
    while True:
        path.write_text(mutant["source"])
        try:
            answer = run_in_fork(lambda: _run_planted(session, path, old, job, functions, cold, tests), job["limit_s"])  # noqa: B023
        finally:
            path.write_text(old)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        if answer.get("again") and not cold:
            cold = True
            continue
        answer |= {"cold": cold, "unsteady": unsteady}
        killer = (answer.get("failed") or [""])[0]
        if not killer:
            return answer
        if "::" not in killer or answer.get("timeout"):
            # A fault of this runner must not count as a kill.
            if not _passes_without_mutant(session, tests, job["limits"], job["limit_s"], cold=cold):
                raise RuntimeError(f"{killer}, without the mutant too: {mutant['path']}")
            return answer
        if _passes_without_mutant(session, [killer], {}, job["limit_s"]):
            return answer
        unsteady.append(killer)
        tests.remove(killer)


def _run_planted(
    session: pytest.Session,
    path: Path,
    old: str,
    job: dict[str, Any],
    functions: dict[str, list[Any]],
    cold: bool,
    tests: list[str],
) -> dict[str, Any]:
    if cold:
        _exec_new_process(tests, job["limits"])
    try:
        swapped = swapping.swap(path, old, job["mutant"]["source"], functions.get(str(path), []))
    except ValueError:  # the mutant has another number of closure variables
        return {"again": True}
    if not swapped and swapping.is_imported(path):
        return {"again": True}
    watcher = Watcher(limits=job["limits"])
    run_items(session, tests, watcher, until_failure=True)
    failed = watcher.failed
    seconds = {test: round(took, 3) for test, took in watcher.seconds.items() if test not in failed}
    return {"failed": failed, "ran": len(watcher.seconds), "seconds": seconds, "clean": not failed}


def _passes_without_mutant(
    session: pytest.Session, tests: list[str], limits: dict[str, float], limit_s: float, *, cold: bool = False
) -> bool:
    """Run the tests without a mutant; return whether they pass within their limits."""

    def child() -> dict[str, Any]:
        if cold:
            _exec_new_process(tests, limits)
        watcher = Watcher(limits=limits)
        run_items(session, tests, watcher, until_failure=True)
        return {"failed": watcher.failed, "clean": not watcher.failed}

    answer = run_in_fork(child, limit_s)
    return not answer.get("failed") and not answer.get("timeout")


def _exec_new_process(tests: list[str], limits: dict[str, float]) -> None:
    """Replace this process by a new pytest that runs these tests on the same database server (see `cold`)."""
    from django.conf import settings

    listed = Path(os.environ["TMPDIR"]) / "tests.txt"
    listed.write_text("\n".join(tests) + "\n")
    (listed.parent / "limits.json").write_text(json.dumps(limits))
    options = ["-q", "-x", "-p", "no:schemathesis", "-p", "no:anyio", "-p", "no:cacheprovider", "--reuse-db"]
    environment = os.environ | {"CYBORG_STATE_DIR": str(settings.KEYS.state_dir), "MUTANTS_COLD": str(_answer_fd)}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", *options, "-p", "tests.mutants.cold", f"@{listed}"]
    os.execve(sys.executable, command, environment)


_template = Template()
_answer_fd = -1
_parent = os.getppid()


def run_in_fork(child: Any, limit_s: float) -> dict[str, Any]:
    """Run `child` in a fork and return its answer; then kill its process group and, if needed, restore the database."""
    global _answer_fd
    readable, _answer_fd = os.pipe()
    pid = os.fork()
    if not pid:
        _run_child(child, readable)
    os.close(_answer_fd)
    text, ends, last, suspended = b"", time.monotonic() + limit_s, time.monotonic(), False
    while (left := ends - time.monotonic()) > 0 and os.getppid() == _parent:
        suspended = suspended or time.monotonic() - last > SUSPENDED_S
        last = time.monotonic()
        if not select.select([readable], [], [], min(left, 1.0))[0]:
            continue
        part = os.read(readable, 1 << 20)
        text += part
        if not part or part.endswith(b"\n"):
            break
    os.close(readable)
    late, suspended = left <= 0, suspended or time.monotonic() - last > SUSPENDED_S
    for _ in range(2):  # a second time for processes that were being started during the first
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            break
    _, status = os.waitpid(pid, 0)
    if os.getppid() != _parent:
        pytest.exit("the run was killed", returncode=1)
    answer = _decode_answer(text, status, late=late)
    if suspended or not answer.get("clean"):
        _template.restore()
    if suspended:  # by SIGSTOP or with the machine; then time limits and deadlines in tests are meaningless
        return run_in_fork(child, limit_s)
    return answer


def _decode_answer(text: bytes, status: int, *, late: bool) -> dict[str, Any]:
    if late or (not text and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM):
        return {"timeout": True, "failed": ["time limit"]}
    if not text:
        return {"failed": [f"ends with {os.waitstatus_to_exitcode(status)} before any test"]}
    answer: dict[str, Any] = json.loads(text)
    return answer


def _run_child(child: Any, readable: int) -> None:
    try:
        os.setpgid(0, 0)
        die_with_parent()
        os.close(readable)
        os.set_inheritable(_answer_fd, True)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        text = json.dumps(child()).encode() + b"\n"
        while text:
            text = text[os.write(_answer_fd, text) :]
        os._exit(0)
    except BaseException as error:  # noqa: BLE001
        os.write(2, f"the fork broke: {error!r}\n".encode())
        os._exit(70)
