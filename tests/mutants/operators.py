"""The mutations of one node: those of mutmut, negated conditions, removed statements, returned None, changed SQL."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import libcst as cst
from mutmut.mutation.mutators import mutation_operators

Operator = Callable[[Any], Iterable[Any]]

SQL_CHANGES = (
    (r"\bAND\b", "OR"),
    (r"\bOR\b(?! REPLACE)", "AND"),
    (r"(?<![<>!:=])=(?![=>])", "<>"),
    (r"<>", "="),
    (r"<(?![>=])", "<="),
    (r"(?<![<>=-])>(?![>=])", ">="),
    (r"<=", "<"),
    (r">=", ">"),
    (r"\bIS NULL\b", "IS NOT NULL"),
    (r"\bIS NOT NULL\b", "IS NULL"),
    (r"\bNOT EXISTS\b", "EXISTS"),
    (r"(?<!NOT )\bEXISTS\b", "NOT EXISTS"),
    (r"\bNOT IN\b", "IN"),
    (r"\bLEFT JOIN\b", "JOIN"),
    (r" FOR (?:NO KEY )?UPDATE[^'\")\n]*", ""),
    (r" SKIP LOCKED\b", ""),
    (r" DESC\b", ""),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r"\btrue\b", "false"),
    (r"\bfalse\b", "true"),
)
SQL = re.compile(r"\b(SELECT .* FROM|UPDATE \S+ .*SET|INSERT INTO|DELETE FROM|WHERE|JOIN|FOR UPDATE)\b", re.DOTALL)


def negate_condition(node: cst.If | cst.While | cst.CompIf) -> Iterable[cst.CSTNode]:
    """Change `if x` to `if not (x)`."""
    inner = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=cst.UnaryOperation(operator=cst.Not(), expression=inner))


def remove_statement(node: cst.Expr | cst.Raise | cst.Del) -> Iterable[cst.CSTNode]:
    """Change a call statement, `await`, `raise` or `del` to `pass`; keep `yield`, so that a generator stays one."""
    if not isinstance(node, cst.Expr) or isinstance(node.value, cst.Call | cst.Await):
        yield cst.Pass()


def return_none(node: cst.Return) -> Iterable[cst.CSTNode]:
    """Change `return x` to `return None`."""
    if node.value is not None and not (isinstance(node.value, cst.Name) and node.value.value == "None"):
        yield node.with_changes(value=cst.Name("None"))


def change_sql(node: cst.SimpleString | cst.FormattedStringText) -> Iterable[cst.CSTNode]:
    """Change one keyword, operator or literal of an SQL statement."""
    if not is_sql(node.value):
        return
    for pattern, replacement in SQL_CHANGES:
        for found in re.finditer(pattern, node.value):
            yield node.with_changes(value=node.value[: found.start()] + replacement + node.value[found.end() :])


def is_sql(text: str) -> bool:
    """Return whether a string is SQL or a part of an SQL statement."""
    return bool(SQL.search(text))


def _name(operator: Operator) -> str:
    return operator.__name__.removeprefix("operator_")


NARROWED: dict[str, Any] = {
    "swap_op": (cst.BinaryOperation, cst.UnaryOperation, cst.BooleanOperation, cst.ComparisonTarget, cst.AugAssign),
    "keywords": (cst.Is, cst.IsNot, cst.In, cst.NotIn, cst.Break, cst.Continue),
}
"""Node types for two operators of mutmut, which otherwise visit every node; that takes a minute for the core."""

OPERATORS: tuple[tuple[Any, str, Operator], ...] = (
    *((NARROWED.get(_name(made), kind), _name(made), made) for kind, made in mutation_operators),
    ((cst.If, cst.While, cst.CompIf), "negate_condition", negate_condition),
    ((cst.Expr, cst.Raise, cst.Del), "remove_statement", remove_statement),
    (cst.Return, "return_none", return_none),
    ((cst.SimpleString, cst.FormattedStringText), "sql", change_sql),
)
