"""List all mutants of a file, draw a sample, and create the source text of one mutant."""

from __future__ import annotations

import difflib
import random
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from tests.mutants.areas import AREAS, ROOT
from tests.mutants.mutant import Mutant
from tests.mutants.operators import OPERATORS, is_sql

LOGGERS = {"log", "logger", "logging"}
MIN_PER_AREA = 10
"""The smallest number of mutants of each area in a sample, if the area has as many."""


@cache
def _parsed(path: str) -> tuple[MetadataWrapper, list[tuple[cst.CSTNode, Any]]]:
    wrapper = MetadataWrapper(cst.parse_module((ROOT / path).read_text()), unsafe_skip_copy=True)
    positions = wrapper.resolve(PositionProvider)
    finder = _Finder()
    wrapper.module.visit(finder)
    return wrapper, [(node, positions[node]) for node in finder.found]


class _Finder(cst.CSTVisitor):
    """Collects the nodes that may be mutated: all but imports, annotations, docstrings, log messages and `__all__`."""

    def __init__(self) -> None:
        self.found: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Import | cst.ImportFrom | cst.Annotation | cst.TypeAlias):
            return False
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.BaseString):
            return False
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call) and _is_logging(node.value):
            return False
        if isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING":
            return False
        if isinstance(node, cst.Assign) and _is_type_machinery(node):
            return False
        if not (isinstance(node, cst.SimpleString) and " " in node.value and not is_sql(node.value)):
            self.found.append(node)  # strings with spaces that are not SQL are text for people, and are left out
        return True


def _is_logging(call: cst.Call) -> bool:
    function = call.func
    while isinstance(function, cst.Attribute):
        function = function.value
    return isinstance(function, cst.Name) and function.value in LOGGERS and isinstance(call.func, cst.Attribute)


def _is_type_machinery(node: cst.Assign) -> bool:
    target = node.targets[0].target
    called = node.value.func if isinstance(node.value, cst.Call) else None
    return (isinstance(target, cst.Name) and target.value in {"__all__", *LOGGERS}) or (
        isinstance(called, cst.Name) and called.value in {"TypeVar", "ParamSpec", "NewType"}
    )


def list_mutants(area: str, path: str) -> Iterator[Mutant]:
    """Yield one mutant for each node and operator. If there are several variants, a hash of the place selects one.

    An SQL statement is a single node, so each of its variants is a separate mutant.
    """
    _, nodes = _parsed(path)
    for number, (node, position) in enumerate(nodes):
        for kind, name, operator in OPERATORS:
            if isinstance(node, kind) and (count := sum(1 for _ in operator(node))):
                chosen = [zlib.crc32(f"{path} {number} {name}".encode()) % count]
                for variant in range(count) if name == "sql" else chosen:
                    yield Mutant(area, path, position.start.line, position.end.line, name, number, variant)


def mutate_source(mutant: Mutant) -> str | None:
    """Return the file's text with the mutation; None if nothing changes or the result is not valid Python."""
    wrapper, nodes = _parsed(mutant.path)
    node = nodes[mutant.number][0]
    operator = next(made for _, name, made in OPERATORS if name == mutant.operator)
    changed = list(operator(node))[mutant.variant]
    replaced = wrapper.module.deep_replace(node, changed)
    text = replaced.code if isinstance(replaced, cst.Module) else wrapper.module.code
    if text == wrapper.module.code:
        return None
    try:
        compile(text, mutant.path, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return text


def format_diff(mutant: Mutant) -> list[str]:
    """Return the changed lines, beginning with `-` and `+`."""
    old, new = (ROOT / mutant.path).read_text(), mutate_source(mutant) or ""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def list_all_mutants() -> dict[str, list[Mutant]]:
    """Return all mutants by area, in the order of its files."""
    return {area.name: [m for path in area.files for m in list_mutants(area.name, path)] for area in AREAS}


def draw_sample(size: int, seed: int, everything: dict[str, list[Mutant]]) -> list[Mutant]:
    """Draw a sample in random order, stratified by area: at least `MIN_PER_AREA` of each, the rest in proportion."""
    chance = random.Random(seed)
    shuffled = {name: chance.sample(sorted(ms, key=lambda m: m.key), len(ms)) for name, ms in everything.items()}
    total = sum(map(len, shuffled.values()))
    wanted = {name: max(MIN_PER_AREA, round(size * len(ms) / total)) for name, ms in shuffled.items()}
    while (excess := sum(wanted.values()) - size) and (excess < 0 or max(wanted.values()) > MIN_PER_AREA):
        wanted[max(wanted, key=wanted.__getitem__)] -= 1 if excess > 0 else -1
    picked = [m for name, ms in shuffled.items() for m in _take_usable(ms, wanted[name])]
    chance.shuffle(picked)
    return picked


def _take_usable(shuffled: list[Mutant], count: int) -> Iterator[Mutant]:
    for mutant in shuffled:
        if not count:
            return
        if mutate_source(mutant) is not None:
            count -= 1
            yield mutant
