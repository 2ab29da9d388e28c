"""A pytest plugin that prints which modules and tests took the longest, for `make slowest`.

The times are those of the calls and of the fixtures. A fixture that several tests share counts for the first of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

MODULES, TESTS = 30, 60
"""How many modules and tests are printed."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the slowest modules and tests, each with its seconds."""
    reports = [one for found in terminalreporter.stats.values() for one in found]
    for line in describe_slowest([one for one in reports if isinstance(one, pytest.TestReport)]):
        terminalreporter.write_line(line)


def describe_slowest(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return the lines: the slowest modules, with the number of their tests, then the slowest tests."""
    by_module, by_test, setups = Counter[str](), Counter[str](), Counter[str]()
    for report in reports:
        by_module[report.nodeid.partition("::")[0]] += report.duration
        by_test[report.nodeid] += report.duration
        if report.when != "call":
            setups[report.nodeid] += report.duration
    counts = Counter(test.partition("::")[0] for test in by_test)
    return [
        f"=== {sum(by_test.values()):.0f} s in {len(by_test)} tests; the slowest modules:",
        *(f"{took:8.1f} s  {module} ({counts[module]} tests)" for module, took in by_module.most_common(MODULES)),
        "=== the slowest tests, with the part that their fixtures took:",
        *(f"{took:8.1f} s  {setups[test]:6.1f} s  {test}" for test, took in by_test.most_common(TESTS)),
    ]
