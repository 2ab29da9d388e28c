"""Merge reports of agents into the inventory tables, many hosts in one transaction."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from django.conf import settings
from django.db import connection, transaction

from accelerators import conductor, conductor_sql
from accelerators.commands import command_queue
from accelerators.domain import admission
from accelerators.domain.diff import (
    HostReport,
    InventoryChanges,
    StoredHost,
    apply_admission_rules,
    collect_changes,
    combine_reports,
    list_provider_ids,
    quarantine_devices,
)
from accelerators.domain.states import EventSource
from accelerators.inventory import merge_sql as sql
from accelerators.runtime import database_clock, jobs, metrics

_stored_host_decoder = msgspec.json.Decoder(StoredHost)
_owners_decoder = msgspec.json.Decoder(dict[str, str])
_encode = msgspec.json.Encoder().encode


def merge_reports(reports: Mapping[int, Sequence[HostReport]]) -> int:
    """Merge `reports` (host id → its reports, in any order); return for how many hosts a report was applied.

    Reports that are not newer than the host's last applied one are dropped, and so are reports of hosts that are
    unknown or being removed. The number of statements does not depend on the size of the batch: one locks the hosts,
    one loads the stored rows, at most fourteen write the differences, and one places `install` commands for devices
    that a rule admits and that need it. If the key or the address of an offered device changes, one statement locks all
    such devices, and one finds out which of them were bound since the rows were loaded: these are quarantined. The
    hosts stay locked until the commit.
    """
    started_at = time.monotonic()
    with conductor.writing():
        cursor = conductor.open_cursor()
        changes, now = InventoryChanges(), database_clock.now().isoformat(timespec="seconds")
        providers = list_provider_ids(report for several in reports.values() for report in several)
        lock_parameters = [list(reports), sorted(providers)]
        rules, owners_text = cursor.execute(sql.LOCK_HOSTS, lock_parameters).fetchone() or ("[]", "{}")
        owners = _owners_decoder.decode(owners_text)
        for (text,) in cursor.execute(sql.SELECT_STORED_HOSTS, [list(reports)]).fetchall():
            host = _stored_host_decoder.decode(text)
            if newest_report := combine_reports(reports[host.id], (host.epoch, host.seq)):
                collect_changes(host, *newest_report, now, changes, owners, settings.KEYS.max_devices_per_host)
        apply_admission_rules(changes, admission.decode_rules(rules))
        if changes.doubts_if_held:
            # Two statements, because a statement does not see requests that were committed while it waited for a lock.
            doubtful = [[device.uuid for _, device, _ in changes.doubts_if_held]]
            cursor.execute(sql.LOCK_DEVICES, doubtful)
            held = {uuid for (uuid,) in cursor.execute(sql.SELECT_HELD_DEVICES, doubtful).fetchall()}
            quarantine_devices(changes, held, now)
        _write_changes(cursor, changes)
        if changes.installs:
            _place_install_commands(changes)
        if changes.provider_intents:
            jobs.enqueue_handler_after_commit("provider")
        metrics.record_merge(time.monotonic() - started_at, len(changes.hosts), len(changes.devices))
        return len(changes.hosts)


def find_locked_hosts(host_ids: Collection[int]) -> list[int]:
    """Return those of these hosts that `merge_reports` cannot merge now, because another transaction has locked the row
    of the host or of one of its devices. Wait for no lock, and keep none. Call it in a transaction."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(sql.SELECT_LOCKED_HOSTS, {"hosts": list(host_ids)})
        transaction.set_rollback(True)  # of the savepoint, which gives the locks back
        return [host_id for (host_id,) in cursor.fetchall()]


def _place_install_commands(changes: InventoryChanges) -> None:
    """Place an `install` command for each device to which an admission rule gave the state installing."""
    orders = [
        command_queue.CommandOrder("install", uuid, actor=rule.name, reason=f"admitted by {rule.state_by}")
        for uuid, rule in changes.installs
    ]
    command_queue.place_commands(orders, EventSource.RULE)


def _write_changes(cursor: Any, changes: InventoryChanges) -> None:
    """Write all changes except the `install` commands, one statement for each kind of change that occurs.

    States and events come before the devices, because the database quarantines a device, with an event, if its new
    columns show that two requests hold one function (`migrations/sql/claim_corrections.sql`).
    """
    for statement, rows in (
        (sql.UPDATE_DEVICE_KEYS, changes.new_keys),
        (sql.UPDATE_DEVICE_STATES, changes.state_changes),
        (conductor_sql.INSERT_EVENTS, changes.events),
        (sql.UPSERT_DEVICES, changes.devices),
        (sql.UPSERT_DEPLOYABLES, changes.deployables),
        (sql.UPSERT_ATTRIBUTES, changes.attributes),
        (sql.UPSERT_HANDLES, changes.handles),
        (conductor_sql.UPSERT_INTENTS, changes.provider_intents),
        (sql.UPDATE_HOSTS, changes.hosts),
    ):
        if rows:
            cursor.execute(statement, [_encode(rows).decode()])
    for statement, ids in (
        (sql.END_PROGRAMS, changes.ended_programs),
        (sql.DELETE_ATTRIBUTES, changes.gone_attributes),
        (sql.MARK_DEPLOYABLES_MISSING, changes.missing_deployables),
        (sql.MARK_HANDLES_MISSING, changes.missing_handles),
        (sql.INCREMENT_GENERATIONS, changes.resized_devices),
    ):
        if ids:
            cursor.execute(statement, [ids])
