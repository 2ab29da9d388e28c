"""Brings the tables in line with what agents report, many hosts in one transaction. Called by `agents.tasks`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from accelerators import conductor
from accelerators.commands import placing
from accelerators.domain import admission
from accelerators.domain.diff import Changes, HostReport, StoredHost, admit, compare, fold
from accelerators.domain.states import Source
from accelerators.inventory import merge_sql as sql
from accelerators.runtime import jobs, metrics

_stored = msgspec.json.Decoder(StoredHost)
_encode = msgspec.json.Encoder().encode


def apply(reports: Mapping[int, Iterable[HostReport]]) -> int:
    """Bring the tables in line with `reports` (host id → its reports, any order); returns how many hosts changed.

    One statement locks the hosts, one loads what is stored, then at most one per table writes: constant, whatever the
    batch's size.
    Reports not newer than the last applied are dropped.
    """
    began = time.monotonic()
    with conductor.writing():
        write = conductor.cursor()
        changes, now = Changes(), datetime.now(UTC).isoformat(timespec="seconds")
        (rules,) = write.execute(sql.LOCK, [list(reports)]).fetchone() or ("[]",)
        for (text,) in write.execute(sql.LOAD, [list(reports)]).fetchall():
            host = _stored.decode(text)
            if folded := fold(reports[host.id], (host.epoch, host.seq)):
                compare(host, *folded, now, changes)
        admit(changes, admission.decode(rules))
        _write(write, changes)
        if changes.installs:
            _install(changes)
        if changes.providers:
            jobs.wake_for("provider")
        metrics.merged(time.monotonic() - began, len(changes.hosts), len(changes.devices))
        return len(changes.hosts)


def _install(changes: Changes) -> None:
    orders = [
        placing.Order("install", uuid, actor=rule.name, reason=f"admitted by {rule.by}")
        for uuid, rule in changes.installs
    ]
    placing.place(orders, Source.RULE)


def _write(cursor: Any, changes: Changes) -> None:
    for statement, rows in (
        (sql.DEVICES, changes.devices),
        (sql.MOVES, changes.moves),
        (sql.DEPLOYABLES, changes.deployables),
        (sql.ATTRIBUTES, changes.attributes),
        (sql.HANDLES, changes.handles),
        (sql.EVENTS, changes.events),
        (sql.INTENTS, changes.providers),
        (sql.HOSTS, changes.hosts),
    ):
        if rows:
            cursor.execute(statement, [_encode(rows).decode()])
    for statement, ids in (
        (sql.GONE_ATTRIBUTES, changes.gone_attributes),
        (sql.MISSING_DEPLOYABLES, changes.missing_deployables),
        (sql.MISSING_HANDLES, changes.missing_handles),
        (sql.GENERATIONS, changes.resized),
    ):
        if ids:
            cursor.execute(statement, [ids])
