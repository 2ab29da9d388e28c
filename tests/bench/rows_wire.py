"""Rows of the wire: heartbeats, durable reports and unchanged reports, each against a server that only acknowledges.

Durable reports are also compared with COPY alone, and with acknowledging and then copying, one after the other. On a
machine with a fast disk, COPY alone is faster than a server that acknowledges and stores nothing.

Contestants take turns every second, so that other load of the machine affects all of them alike; the ratio is the
median over the rounds. No merge runs meanwhile: only the gateway and its commits are measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import psycopg
from django.db import connection

from agents.gateway.writer import COPY_TO_SPOOL, COPY_TYPES
from tests.bench import fixtures, messages
from tests.bench.figures import Row, cpu_s, median
from tests.bench.lab import SERVER_CORE, Generator, Lab, Server, pin_to_cores, run_server
from tests.bench.statements import collect_statements

DEVICES = 10
UNCHANGED = "ab" * 20
UNREAD = "a socket that reads nothing"
PLAIN_COPY = "COPY spool (host_id, epoch, seq, payload, urgent) FROM STDIN"
TIMERS = re.compile(
    r"SELECT 1(?: FROM spool LIMIT 1)?$|SELECT host_id, public_key, barred,|SELECT h\.id FROM accelerators_host h\s"
    r"|SET lock_timeout"
)
"""Periodic statements: the writer's checks of the spool (10 s), of barred agents and of hosts whose report is needed
again (2.5 s), the health check, and the time limit for locks on a new connection."""


@dataclass(frozen=True)
class Size:
    """Number of agents, of rounds, and seconds of each turn."""

    agents: int
    rounds: int
    seconds: float


Write = Callable[[psycopg.Cursor[Any], list[tuple[Any, ...]]], None]


@dataclass(frozen=True)
class Turn:
    """The results of one turn of one contestant."""

    rate: float
    cpu_us: float
    p99_ms: float


def rows(lab: Lab, generator: Generator, size: Size, progress: Callable[[str], None]) -> list[Row]:
    """Return the rows: heartbeats, durable reports (two ceilings), unchanged reports."""
    fixtures.enrol(size.agents)
    found: list[Row] = []
    with run_server(lab, "bare") as bare, run_server(lab, "acknowledging") as acknowledging:
        with run_server(lab, "product") as product:
            progress("Beats against a bare socket")
            found.append(_measure_beats(generator, size, bare, product))
            progress("durable reports against acknowledging only, and against COPY")
            found += _measure_durable_reports(generator, size, bare, acknowledging, product)
        progress("unchanged reports against acknowledging only")
        found.append(_measure_unchanged_reports(lab, generator, size, bare, acknowledging))
    return found


def run_contest(
    generator: Generator, size: Size, contestants: list[tuple[Server, str]], between: Callable[[], None]
) -> list[list[Turn]]:
    """Let contestants take turns, and call `between` after each round; return the turns of each, without a warm-up."""
    for number, (server, _) in enumerate(contestants):
        generator.connect(f"group{number}", server.port, size.agents)
    turns: list[list[Turn]] = [[] for _ in contestants]
    for number, (_, message) in enumerate(contestants):
        generator.ask("run", group=f"group{number}", message=message, devices=DEVICES, seconds=0.5)
    between()
    for _ in range(size.rounds):
        for number, (server, message) in enumerate(contestants):
            turns[number].append(_run_turn(generator, server, f"group{number}", message, size.seconds))
        between()
    for number in range(len(contestants)):
        generator.ask("close", group=f"group{number}")
    return turns


def _run_turn(generator: Generator, server: Server, group: str, message: str, seconds: float) -> Turn:
    before = cpu_s(server.pid)
    done = generator.ask("run", group=group, message=message, devices=DEVICES, seconds=seconds)
    spent = cpu_s(server.pid) - before
    return Turn(done["count"] / done["seconds"], spent / done["count"] * 1e6, done["p99_ms"])


def _make_row(
    name: str,
    unit: str,
    against: str,
    bound: float,
    ceiling: list[Turn],
    ours: list[Turn],
    note: str,
    *,
    holds: bool = True,
) -> Row:
    cpu, of = (median([turn.cpu_us for turn in turns]) for turns in (ours, ceiling))
    text = f"{note}; CPU {cpu:.1f} against {of:.1f} µs, p99 {median([t.p99_ms for t in ours]):.0f} ms"
    return Row(
        name,
        _get_median_rate(ours),
        unit,
        against,
        bound,
        _get_median_rate(ceiling),
        _get_median_ratio(ours, ceiling),
        cpu,
        text,
        holds,
    )


def _get_median_rate(turns: list[Turn]) -> float:
    return median([turn.rate for turn in turns])


def _get_median_ratio(ours: list[Turn], theirs: list[Turn]) -> float:
    """Return the median of the ratios of all rounds, because a disturbance affects both turns of one round."""
    return median([a.rate / b.rate for a, b in zip(ours, theirs, strict=True)])


def _format_ratio(ours: list[Turn], theirs: list[Turn]) -> str:
    return f"{_get_median_ratio(ours, theirs):.0%}"


def _measure_beats(generator: Generator, size: Size, bare: Server, product: Server) -> Row:
    ceiling, ours = run_contest(generator, size, [(bare, "beat"), (product, "beat")], lambda: None)
    note = f"{size.agents} agents, one Beat under way each"
    return _make_row("Beat decoded and acknowledged", "/s", "bare ASGI socket", 0.75, ceiling, ours, note)


def _measure_durable_reports(
    generator: Generator, size: Size, bare: Server, acknowledging: Server, product: Server
) -> list[Row]:
    plain: list[Turn] = []
    binary: list[Turn] = []
    batches: list[float] = []

    def between() -> None:
        batches.append(_measure_batch_size())
        for copies, copy in ((plain, _copy_plain), (binary, _copy_binary)):
            fixtures.empty_spool()
            copies.append(_measure_copy(copy, round(batches[-1]), size.seconds))
        fixtures.empty_spool()

    contestants = [(bare, "report"), (acknowledging, "report"), (product, "report")]
    unread, ceiling, ours = run_contest(generator, size, contestants, between)
    batch, plain, binary = median(batches[1:]), plain[1:], binary[1:]
    length = len(messages.report(messages.report_parts(messages.devices(DEVICES)), 1))
    name = f"durable report of {DEVICES} devices"
    note = (
        f"{size.agents} agents, {length} bytes each, {batch:.0f} to a commit; {_format_ratio(ours, unread)} of {UNREAD}"
    )
    rate = f"{_get_median_rate(binary):.0f}/s"
    copied = f"as psycopg writes it; {_format_ratio(ours, binary)} of binary COPY as in the spool ({rate})"
    both = [_combine_turns(one, other) for one, other in zip(ceiling, plain, strict=True)]
    return [
        _make_row(name, "/s", "acknowledge-only, same bytes", 0.38, ceiling, ours, note),
        _make_row(name, "/s", "raw COPY of the same rows", 0.60, plain, ours, copied),
        _make_row(name, "/s", "acknowledge-only, then raw COPY", 0.75, both, ours, "both works, one after the other"),
    ]


def _combine_turns(first: Turn, second: Turn) -> Turn:
    """Return the turn of a contestant that does both works for each report, one after the other."""
    return Turn(1 / (1 / first.rate + 1 / second.rate), first.cpu_us + second.cpu_us, max(first.p99_ms, second.p99_ms))


def _measure_batch_size() -> float:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*)::float / greatest(count(DISTINCT received_at), 1) FROM spool")
        return max(1.0, float(cursor.fetchone()[0]))


def _copy_plain(cursor: psycopg.Cursor[Any], rows: list[tuple[Any, ...]]) -> None:
    with cursor.copy(PLAIN_COPY) as copy:
        for row in rows:
            copy.write_row(row)


def _copy_binary(cursor: psycopg.Cursor[Any], rows: list[tuple[Any, ...]]) -> None:
    with cursor.copy(COPY_TO_SPOOL) as copy:
        copy.set_types(COPY_TYPES)
        for row in rows:
            copy.write_row(row)


def _measure_copy(write: Write, batch: int, seconds: float) -> Turn:
    """Measure how many reports one thread copies into the spool, doing nothing else, on the server's core."""
    parts = messages.report_parts(messages.devices(DEVICES))
    count = seq = 0
    parameters = connection.get_connection_params()
    wanted = {name: parameters[name] for name in ("dbname", "user", "host")}
    with pin_to_cores(SERVER_CORE), psycopg.connect(**wanted) as link:
        began, cpu = perf_counter(), process_time()
        while perf_counter() - began < seconds:
            rows = [(number, 1, seq + number, messages.report(parts, seq + number), False) for number in range(batch)]
            with link.cursor() as cursor:
                write(cursor, rows)
            link.commit()
            count, seq = count + batch, seq + batch
        took, spent = perf_counter() - began, process_time() - cpu
    return Turn(count / took, spent / count * 1e6, 0.0)


def _measure_unchanged_reports(lab: Lab, generator: Generator, size: Size, bare: Server, acknowledging: Server) -> Row:
    fixtures.empty_spool()
    fixtures.enrol(size.agents, UNCHANGED)
    with run_server(lab, "product", CYBORG_LEASE_FLUSH_S="3600") as product:
        contestants = [(server, UNCHANGED) for server in (bare, acknowledging, product)]
        unread, ceiling, ours = run_contest(generator, size, contestants, lambda: None)
        generator.connect("counted", product.port, size.agents)
        count, reports = _count_statements(lab, generator)
        generator.ask("close", group="counted")
    note = (
        f"{count} statements for {reports} reports (PostgreSQL's log of all statements, timers left out);"
        f" {_format_ratio(ours, unread)} of {UNREAD}"
    )
    against = "acknowledge-only, same bytes"
    return _make_row("unchanged report", "/s", against, 0.80, ceiling, ours, note, holds=count == 0)


def _count_statements(lab: Lab, generator: Generator) -> tuple[int, int]:
    """Send unchanged reports for a second; return the number of the product's statements and of reports."""
    with collect_statements(lab) as found:
        done = generator.ask("run", group="counted", message=UNCHANGED, devices=DEVICES, seconds=1.0)
    return sum(not TIMERS.match(text) for text in found), done["count"]
