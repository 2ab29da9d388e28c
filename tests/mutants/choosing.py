"""Choose the tests for a mutant: a limited number of those that execute its line, the fastest first."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from tests.mutants.areas import AREAS, PRODUCT, ROOT
from tests.mutants.mutant import Mutant

MAX_TESTS, MAX_S = 150, 40.0
"""Limits for one mutant: number of tests, and their total seconds. The report counts mutants with omitted tests."""


@dataclass(frozen=True)
class Choice:
    """The tests for a mutant, fastest first; `cold` if it needs a new process; the number of omitted tests."""

    tests: tuple[str, ...]
    cold: bool
    left_out: int


class Recording:
    """The result of one run of all tests under coverage: which test executes which line, and how long each takes."""

    def __init__(self, import_lines: dict[str, list[int]]) -> None:
        self.seconds: dict[str, float] = {}
        self._import_lines = {path: set(lines) for path, lines in import_lines.items()}
        self._tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))

    def add(self, entry: dict[str, dict[str, dict[str, list[int]]]]) -> None:
        """Add the recording of one test file, without tests that failed or were skipped: they cannot detect mutants."""
        useless = {*entry["failed"], *entry["skipped"]}
        self.seconds |= {test: float(s) for test, s in entry["seconds"].items() if test not in useless}  # type: ignore[arg-type]
        for test, files in entry["lines"].items():
            if test not in useless:
                for path, lines in files.items():
                    for line in lines:
                        self._tests[path][line].add(test)

    def add_times(self, seconds: dict[str, float]) -> None:
        """Keep the shortest time of each test, because the recording ran under coverage and maybe on a busy machine."""
        for test, took in seconds.items():
            self.seconds[test] = min(took, self.seconds.get(test, took))

    def choose(self, mutant: Mutant) -> Choice:
        """Choose tests that execute the mutant's line; for code that runs at import, tests that execute its uses."""
        in_function, found = self._find_executing_tests(mutant)
        own = {area.name: area.tests for area in AREAS}[mutant.area]
        cold = not in_function or mutant.line in self._import_lines.get(mutant.path, ())
        ordered = _interleave_files(found, own, self.seconds)
        ordered += [
            t for t in sorted(self.seconds, key=self.seconds.__getitem__) if _get_file(t) in own and t not in found
        ]
        chosen, spent = [], 0.0
        for test in ordered:
            if len(chosen) < MAX_TESTS and spent + self.seconds[test] <= MAX_S:
                chosen.append(test)
                spent += self.seconds[test]
        chosen.sort(key=self.seconds.__getitem__)
        return Choice(tuple(chosen), cold, len(found - set(chosen)))

    def _find_executing_tests(self, mutant: Mutant) -> tuple[bool, set[str]]:
        by_line = self._tests.get(mutant.path, {})

        def of(lines: Iterable[int]) -> set[str]:
            return set().union(*(by_line.get(line, ()) for line in lines))

        place = _find_place(mutant.path, mutant.line)
        if place.function:
            statement = of([mutant.line]) or of(range(mutant.line, mutant.end_line + 1)) or of(place.statement)
            return True, statement or of(place.function)
        found = of(place.body)
        if not found and place.names:
            found = self._find_tests_of_uses(place.names)
        return False, found or of(by_line)

    def _find_tests_of_uses(self, names: tuple[str, ...]) -> set[str]:
        """Return the tests that execute a line of the product that contains one of these names."""
        word = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        found: set[str] = set()
        for path, by_line in self._tests.items():
            if path.startswith(PRODUCT):
                for number, line in enumerate(_read_lines(path), 1):
                    if number in by_line and word.search(line):
                        found |= by_line[number]
        return found


def _interleave_files(found: set[str], own: tuple[str, ...], seconds: dict[str, float]) -> list[str]:
    """Order tests: one of each file in turn, fastest first, because tests of one file tend to find the same faults."""
    files: dict[str, list[str]] = defaultdict(list)
    for test in sorted(found & seconds.keys(), key=lambda t: (seconds[t], t)):
        files[_get_file(test)].append(test)
    queues = sorted(files.values(), key=lambda tests: (_get_file(tests[0]) not in own, seconds[tests[0]]))
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def _get_file(test: str) -> str:
    return test.partition("::")[0]


@dataclass(frozen=True)
class _Place:
    """The place of a line: the lines of its innermost statement, of the function around it (None outside functions) and
    of a definition's body, and the names that an assignment defines."""

    statement: range
    function: range | None
    body: range
    names: tuple[str, ...]


@lru_cache(maxsize=200)
def _read_lines(path: str) -> list[str]:
    return (ROOT / path).read_text().splitlines()


@lru_cache(maxsize=200)
def _parse_statements(path: str) -> list[ast.stmt]:
    return [node for node in ast.walk(ast.parse("\n".join(_read_lines(path)))) if isinstance(node, ast.stmt)]


def _find_place(path: str, line: int) -> _Place:
    around = [s for s in _parse_statements(path) if _get_first_line(s) <= line <= (s.end_lineno or 0)]
    inner = min(around, key=lambda s: (s.end_lineno or 0) - _get_first_line(s), default=None)
    functions = [
        s for s in around if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef) and s.body[0].lineno <= line
    ]
    outer = min(functions, key=_get_first_line, default=None)
    function = range(outer.body[0].lineno, (outer.end_lineno or 0) + 1) if outer else None
    if inner is None:
        return _Place(range(0), None, range(0), ())
    statement, body = range(_get_first_line(inner), (inner.end_lineno or 0) + 1), range(0)
    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        body = range(inner.body[0].lineno, (inner.end_lineno or 0) + 1)
    targets = getattr(inner, "targets", None) or [getattr(inner, "target", None)]
    names = [n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)]
    return _Place(statement, function, body, tuple(names))


def _get_first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])
