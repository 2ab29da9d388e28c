"""The journal's tables of commands: which commands were received, how they ended, and what they left on the host.

Every change is one durable transaction, and it is committed before the action that it describes: a command's row before
its `Taken`, the state *started* before the host is touched, a file's first value before its first write, and the state
*done* before the `Result` is sent.
"""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from agents import wire
from drivers.plan import Ask

log = logging.getLogger("cyborg.journal")

DecodedT = TypeVar("DecodedT")

CREATE_COMMAND_TABLES = """
CREATE TABLE command (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    number INTEGER NOT NULL,
    message TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'received' CHECK (state IN ('received', 'started', 'done')),
    boot TEXT NOT NULL DEFAULT '',
    result TEXT NOT NULL DEFAULT '',
    acknowledged INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX command_number ON command (number);
CREATE TABLE applied (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    driver TEXT NOT NULL,
    key TEXT NOT NULL,
    slot TEXT NOT NULL,
    ask TEXT NOT NULL,
    boot TEXT NOT NULL,
    UNIQUE (driver, key, slot)
) STRICT;
CREATE TABLE first (
    driver TEXT NOT NULL,
    key TEXT NOT NULL,
    path TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (driver, key, path)
) STRICT
"""
KEEP_ACKNOWLEDGED, KEEP_OTHERS = 1000, 10_000
"""How far back commands are kept, counted from the newest one: acknowledged ones, and all others.

An acknowledged command is kept so that it does not run a second time if it comes again. A command that was started and
has not ended is always kept.
"""
ATTACH_PREFIX = "attach:"
"""Prefix of an attachment's slot; the handle's uuid follows. The other slots are the names of acts."""

LoggedState = Literal["new", "received", "started", "done"]
"""State of a command; *new* means that it is not in the journal yet."""


@dataclass(frozen=True)
class AppliedEffect:
    """An act whose effect must last: after a reboot the driver is asked for it again, in the order of the list.

    `boot_id` is that under which the act was last done. It is '' for an attachment that was begun and is not known to
    be completed: an attachment counts as existing from before its first step until it is surely gone (promise S3).
    """

    driver: str
    key: str
    slot: str
    ask: Ask
    boot_id: str


class CommandLog:
    """Access to the tables of commands in an open journal.

    Every writing method raises sqlite3.OperationalError when the disk is full or read-only.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.unacknowledged: dict[int, wire.Result] = {}
        """Results that the gateway has not acknowledged, by command number."""
        for number, text in connection.execute(
            "SELECT number, result FROM command WHERE state = 'done' AND NOT acknowledged ORDER BY number"
        ):
            if result := _decode_or_none(text, wire.Result):
                self.unacknowledged[number] = result

    def store_command(self, command: wire.Command) -> LoggedState:
        """Store a command if its id is not known yet, and return the state that it had before.

        If the command is done already, its result is put into `unacknowledged` once more.
        """
        row = self._fetch_row("SELECT state, result FROM command WHERE id = ?", command.id)
        if row is None:
            self._execute_statement(
                "INSERT INTO command (id, number, message) VALUES (?, ?, ?)",
                (command.id, command.number, wire.encode_message(command)),
            )
            return "new"
        state: LoggedState = row[0]
        if state == "done" and (result := _decode_or_none(row[1], wire.Result)):
            self.unacknowledged[command.number] = result
        return state

    def mark_started(self, command: wire.Command, boot_id: str) -> None:
        """Mark the command as started, in this boot of the host. From now on it is never run again."""
        self._execute_statement("UPDATE command SET state = 'started', boot = ? WHERE id = ?", (boot_id, command.id))

    def store_result(self, command: wire.Command, result: wire.Result) -> None:
        """Mark the command as done, store its result, and put the result into `unacknowledged`."""
        self._execute_statement(
            "UPDATE command SET state = 'done', result = ? WHERE id = ?", (wire.encode_message(result), command.id)
        )
        self.unacknowledged[command.number] = result

    def acknowledge_result(self, number: int) -> None:
        """Remove a result from `unacknowledged`: the gateway has stored it for good. Ignores an unknown number.

        The command's id and result (without `detail`) stay, so that the command is recognised if it comes again. Rows
        beyond KEEP_ACKNOWLEDGED and KEEP_OTHERS are deleted.
        """
        result = self.unacknowledged.pop(number, None)
        if result is None:
            return
        brief = wire.encode_message(msgspec.structs.replace(result, detail={}))
        with self._connection:
            self._connection.execute(
                "UPDATE command SET acknowledged = 1, message = '', result = ? WHERE number = ? AND state = 'done'",
                (brief, number),
            )
            self._connection.execute(
                "DELETE FROM command WHERE seq <= (SELECT max(seq) FROM command) - CASE WHEN acknowledged"
                f" THEN {KEEP_ACKNOWLEDGED} ELSE {KEEP_OTHERS} END AND state <> 'started'"
            )

    def list_interrupted(self) -> list[tuple[wire.Command, str]]:
        """Return the commands that were started and have not ended, each with the boot id at its start.

        They are ordered by number. A command that cannot be decoded is logged and left out.
        """
        rows = self._connection.execute("SELECT message, boot FROM command WHERE state = 'started' ORDER BY number")
        return [(command, boot) for text, boot in rows.fetchall() if (command := _decode_or_none(text, wire.Command))]

    def delete_unstarted(self) -> None:
        """Delete the commands that were not started: after a restart the gateway sends them again, with new times."""
        self._execute_statement("DELETE FROM command WHERE state = 'received'")

    def store_effect(self, effect: AppliedEffect) -> None:
        """Store an effect on the host as the last one in the order; it replaces the entry of the same slot."""
        with self._connection:
            self._delete_effect(effect.driver, effect.key, effect.slot)
            self._connection.execute(
                "INSERT INTO applied (driver, key, slot, ask, boot) VALUES (?, ?, ?, ?, ?)",
                (effect.driver, effect.key, effect.slot, msgspec.json.encode(effect.ask).decode(), effect.boot_id),
            )

    def confirm_effect(self, effect: AppliedEffect, boot_id: str) -> None:
        """Note that the effect was restored, or still holds, in this boot. Its place in the order stays."""
        self._execute_statement(
            "UPDATE applied SET boot = ? WHERE driver = ? AND key = ? AND slot = ?",
            (boot_id, effect.driver, effect.key, effect.slot),
        )

    def remove_effects(self, driver: str, key: str, *slots: str) -> None:
        """Delete these slots of a device, because their effects are gone from the host."""
        with self._connection:
            for slot in slots:
                self._delete_effect(driver, key, slot)

    def list_effects(self) -> list[AppliedEffect]:
        """Return all stored effects, in the order in which they were made; unreadable ones are logged and left out."""
        rows = self._connection.execute("SELECT driver, key, slot, ask, boot FROM applied ORDER BY seq").fetchall()
        decoded_rows = [(row, _decode_or_none(row[3], Ask)) for row in rows]
        return [
            AppliedEffect(driver, key, slot, ask, boot_id)
            for (driver, key, slot, _, boot_id), ask in decoded_rows
            if ask
        ]

    def list_attachments(self, driver: str, key: str) -> dict[str, str]:
        """Return handle uuid → consumer for all handles of the device that are, or may be, attached."""
        effects = (effect for effect in self.list_effects() if (effect.driver, effect.key) == (driver, key))
        return {one.ask.uuid: one.ask.consumer for one in effects if one.slot.startswith(ATTACH_PREFIX)}

    def list_attached_devices(self) -> list[tuple[str, str]]:
        """Return (driver, device key) of all devices with handles that are, or may be, attached."""
        effects = (effect for effect in self.list_effects() if effect.slot.startswith(ATTACH_PREFIX))
        return list(dict.fromkeys((effect.driver, effect.key) for effect in effects))

    def find_attachment(self, driver: str) -> AppliedEffect | None:
        """Return one handle of the driver that is, or may be, attached; None when there is none."""
        attachments = (
            effect
            for effect in self.list_effects()
            if effect.driver == driver and effect.slot.startswith(ATTACH_PREFIX)
        )
        return next(attachments, None)

    def store_first_value(self, driver: str, key: str, path: str, value: str) -> None:
        """Store what a file held before its first write for this device; a value that is stored already stays."""
        self._execute_statement(
            "INSERT INTO first VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", (driver, key, path, value)
        )

    def get_first_values(self, driver: str, key: str) -> dict[str, str]:
        """Return path → value before the agent's first write, for this device."""
        rows = self._connection.execute("SELECT path, value FROM first WHERE driver = ? AND key = ?", (driver, key))
        return dict(rows.fetchall())

    def delete_first_values(self, driver: str, key: str) -> None:
        """Delete the stored first values of a device, because `uninstall` has restored them."""
        self._execute_statement("DELETE FROM first WHERE driver = ? AND key = ?", (driver, key))

    def _delete_effect(self, driver: str, key: str, slot: str) -> None:
        """Delete one slot of a device in the caller's transaction; do nothing if there is none."""
        self._connection.execute("DELETE FROM applied WHERE (driver, key, slot) = (?, ?, ?)", (driver, key, slot))

    def _fetch_row(self, statement: str, *values: Any) -> tuple[Any, ...] | None:
        """Execute a query and return its first row, None when it has none."""
        row: tuple[Any, ...] | None = self._connection.execute(statement, values).fetchone()
        return row

    def _execute_statement(self, statement: str, values: tuple[Any, ...] = ()) -> None:
        """Execute one statement as a transaction; it is durable when this returns. Raises sqlite3.OperationalError."""
        with self._connection:
            self._connection.execute(statement, values)


def _decode_or_none(text: str, kind: type[DecodedT]) -> DecodedT | None:
    """Decode JSON from the journal; log and return None when it cannot be decoded.

    Another release may have written it in another form, and that must not keep the agent from starting.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        log.error("the journal holds a %s that this release cannot read (%s): it is ignored", kind.__name__, error)
        return None
