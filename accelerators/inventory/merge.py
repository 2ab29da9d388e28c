"""Merge reports of agents into the inventory tables, many hosts in one transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from accelerators import conductor, conductor_sql
from accelerators.commands import placing
from accelerators.domain import admission
from accelerators.domain.diff import Changes, HostReport, StoredHost, admit, compare, fold
from accelerators.domain.states import Source
from accelerators.inventory import merge_sql as sql
from accelerators.runtime import jobs, metrics

_stored = msgspec.json.Decoder(StoredHost)
_encode = msgspec.json.Encoder().encode


def apply(reports: Mapping[int, Iterable[HostReport]]) -> int:
    """Merge `reports` (host id → its reports, in any order); return for how many hosts a report was applied.

    Reports that are not newer than the host's last applied one are dropped. The number of statements does not depend on
    the size of the batch: one locks the hosts, one loads the stored rows, at most twelve write the differences, and one
    places `install` commands for devices that a rule admits and that need it. The hosts stay locked until the commit.
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
    """Place an `install` command for each device that an admission rule made installing."""
    orders = [
        placing.Order("install", uuid, actor=rule.name, reason=f"admitted by {rule.by}")
        for uuid, rule in changes.installs
    ]
    placing.place(orders, Source.RULE)


def _write(cursor: Any, changes: Changes) -> None:
    """Write all changes, one statement for each kind of change that occurs."""
    for statement, rows in (
        (sql.DEVICES, changes.devices),
        (sql.MOVES, changes.moves),
        (sql.DEPLOYABLES, changes.deployables),
        (sql.ATTRIBUTES, changes.attributes),
        (sql.HANDLES, changes.handles),
        (conductor_sql.EVENTS, changes.events),
        (conductor_sql.INTENTS, changes.providers),
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
