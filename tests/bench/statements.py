"""Collect the statements that the servers run, from PostgreSQL's log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection

from tests.bench.lab import Lab

STATEMENT = re.compile(r"\[(?P<pid>\d+)\] LOG:  (?:statement|execute [^:]*): \s*(?P<text>.*(?:\n\t.*)*)")


@contextmanager
def collect_statements(lab: Lab) -> Iterator[list[str]]:
    """Yield a list; when the context is left, it is filled with the statements of all other connections."""
    found: list[str] = []
    with collect_statements_by_backend(lab) as collected:
        yield found
    found += [text for _, text in collected]


@contextmanager
def collect_statements_by_backend(lab: Lab) -> Iterator[list[tuple[str, str]]]:
    """Do the same as `collect_statements`, with pairs of the backend's process id and the statement."""
    log = lab.home / "postgres" / "log"
    found: list[tuple[str, str]] = []
    _set_log_statement("all")
    begin = log.stat().st_size
    yield found
    with log.open() as lines:
        lines.seek(begin)
        matches = list(STATEMENT.finditer(lines.read()))
    _set_log_statement("none")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        ours = str(cursor.fetchone()[0])
    found += [(match["pid"], match["text"]) for match in matches if match["pid"] != ours]


def _set_log_statement(which: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER SYSTEM SET log_statement = '{which}'")
        cursor.execute("SELECT pg_reload_conf(), pg_sleep(0.2)")
