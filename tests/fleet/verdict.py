"""Judge the end of a scenario: compare acknowledged reports with the tables; each promise gives one line."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.fleet.installation import FleetSnapshot, Installation

STORED = """
SELECT h.name, h.applied_hash, count(d.id) FILTER (WHERE d.state <> 'missing'),
       coalesce(string_agg(DISTINCT d.model, ' ') FILTER (WHERE d.state <> 'missing'), '')
FROM accelerators_host h LEFT JOIN accelerators_device d ON d.host_id = h.id
WHERE h.name LIKE 'bench-%' GROUP BY h.id
"""
STUCK = """
SELECT (SELECT count(*) FROM spool), (SELECT count(*) FROM accelerators_intent WHERE kind <> 'provider'),
       (SELECT count(*) FROM tick WHERE at < now() - interval '30 s')
"""
MEMORY_KB = 96
"""Largest memory of the web process for each agent: its connection, handshake and report."""
MEMORY_FREE_KB = 60_000
COME_BACK = frozenset({"503", "busy"})
"""Refusals that a correct agent may get under load. Every other refusal means that the agent did something wrong."""


@dataclass(frozen=True)
class PromiseLine:
    """One promise: what was measured, and whether the promise holds."""

    promise: str
    found: str
    holds: bool
    value: float | None = None
    """The number that was judged, if there is one."""


def wait_until_settled(
    installation: Installation, patience_s: float, show: Callable[[FleetSnapshot], None] = lambda snapshot: None
) -> tuple[bool, FleetSnapshot]:
    """Wait until all agents are connected and acknowledged, the spool is empty and all hosts are up.

    Return whether this happened within `patience_s`, and the last snapshot.
    """
    end = time.monotonic() + patience_s
    while True:
        snapshot = installation.take_snapshot()
        show(snapshot)
        done = (
            snapshot.connected == installation.count
            and not snapshot.owing
            and snapshot.spool == 0
            and snapshot.up == installation.count
        )
        if done or time.monotonic() > end:
            return done, snapshot
        time.sleep(0.5)


def find_lost_hosts(installation: Installation) -> list[str]:
    """Describe hosts whose tables match neither the last acknowledged report nor one sent after it; [] if none."""
    states = installation.fleet.ask("states")["states"]
    stored = {name: rest for name, *rest in installation.query(STORED) or []}
    wrong = []
    for name, _epoch, _seq, content, model, devices, since in states:
        applied, show, models = stored.get(name, ("", 0, ""))
        right = any(
            applied == one and (not of or (show, models) == (devices, of)) for one, of in [(content, model), *since]
        )
        if content and not right:
            wrong.append(f"{name}: acknowledged {model or 'an error'}, stored {show} of {models or 'nothing'}")
    return wrong


def is_connection_failure(what: str) -> bool:
    """Return whether an attempt failed without a refusal: by an operating system error, a close or silence."""
    error = getattr(builtins, what, None)
    return what in ("closed", "silence") or (isinstance(error, type) and issubclass(error, OSError))


def judge(
    installation: Installation, done: bool, began: float, before: FleetSnapshot, more: list[PromiseLine]
) -> list[PromiseLine]:
    """Return the promises of every scenario, followed by those of this scenario (`more`)."""
    last = installation.snapshots[-1]
    wrong = find_lost_hosts(installation)
    stuck = installation.query(STUCK)
    most = max(snapshot.web_kb for snapshot in installation.snapshots)
    bound = before.web_kb + MEMORY_FREE_KB + MEMORY_KB * installation.count + installation.extra_memory_kb
    tried = ", ".join(f"{count} {what}" for what, count in sorted(last.refused.items())) or "none"
    strange = [what for what in last.refused if what not in COME_BACK and not is_connection_failure(what)]
    acknowledged, told = last.counts.get("acknowledged", 0), f" ({'; '.join(wrong[:3])})" if wrong else ""
    return [
        PromiseLine("none lost", f"{acknowledged} acknowledged, {len(wrong)} hosts not in the tables{told}", not wrong),
        PromiseLine(
            "none stuck",
            f"{last.connected} of {installation.count} connected, {last.owing} owe a report, {last.up} up;"
            f" spool, intents, jobs that wait: {stuck[0] if stuck else 'no answer'}",
            done and bool(stuck) and not any(stuck[0]),
        ),
        PromiseLine("memory of web", f"{most / 1024:.0f} MB at most, of {bound / 1024:.0f}", most <= bound),
        PromiseLine("only told to come back", f"attempts that failed: {tried}", not strange),
        PromiseLine("all settled", f"{time.monotonic() - began:.1f} s", done),
        *more,
    ]


def table(lines: list[PromiseLine]) -> str:
    """Return the lines as an aligned table; each begins with `ok` or `BROKEN`."""
    width = max(len(line.promise) for line in lines)
    return "\n".join(f"{'ok    ' if line.holds else 'BROKEN'}  {line.promise:<{width}}  {line.found}" for line in lines)
