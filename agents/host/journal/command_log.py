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

T = TypeVar("T")

TABLES = """
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
KEPT, LIMIT = 1000, 10_000
"""How far back commands are kept, counted from the newest one: acknowledged ones, and all others.

An acknowledged command is kept so that it does not run a second time if it comes again. A command that was started and
has not ended is always kept.
"""
ATTACH = "attach:"
"""Prefix of an attachment's slot; the handle's uuid follows. The other slots are the names of acts."""

State = Literal["new", "received", "started", "done"]
"""State of a command; *new* means that it is not in the journal yet."""


@dataclass(frozen=True)
class Applied:
    """An act whose effect must last: after a reboot the driver is asked for it again, in the order of the list.

    `boot_id` is that under which the act was last done. It is '' for an attachment that was begun and is not known to
    be completed: an attachment counts as existing from before its first step until it is surely gone (promise S3).
    """

    driver: str
    key: str
    slot: str
    ask: Ask
    boot: str


class Ledger:
    """Access to the tables of commands in an open journal.

    Every writing method raises sqlite3.OperationalError when the disk is full or read-only.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.owed: dict[int, wire.Result] = {}
        """Results that the gateway has not acknowledged, by command number."""
        for number, text in connection.execute(
            "SELECT number, result FROM command WHERE state = 'done' AND NOT acknowledged ORDER BY number"
        ):
            if result := _decoded(text, wire.Result):
                self.owed[number] = result

    def hear(self, command: wire.Command) -> State:
        """Store a command if its id is not known yet, and return the state that it had before.

        If the command is done already, its result is put into `unacknowledged` once more.
        """
        row = self._one("SELECT state, result FROM command WHERE id = ?", command.id)
        if row is None:
            self._write(
                "INSERT INTO command (id, number, message) VALUES (?, ?, ?)",
                (command.id, command.number, wire.encode(command)),
            )
            return "new"
        state: State = row[0]
        if state == "done" and (result := _decoded(row[1], wire.Result)):
            self.owed[command.number] = result
        return state

    def begin(self, command: wire.Command, boot: str) -> None:
        """Mark the command as started, in this boot of the host. From now on it is never run again."""
        self._write("UPDATE command SET state = 'started', boot = ? WHERE id = ?", (boot, command.id))

    def end(self, command: wire.Command, result: wire.Result) -> None:
        """Mark the command as done, store its result, and put the result into `unacknowledged`."""
        self._write("UPDATE command SET state = 'done', result = ? WHERE id = ?", (wire.encode(result), command.id))
        self.owed[command.number] = result

    def acknowledge(self, number: int) -> None:
        """Remove a result from `unacknowledged`: the gateway has stored it for good. Ignores an unknown number.

        The command's id and result (without `detail`) stay, so that the command is recognised if it comes again. Rows
        beyond KEEP_ACKNOWLEDGED and KEEP_OTHERS are deleted.
        """
        result = self.owed.pop(number, None)
        if result is None:
            return
        brief = wire.encode(msgspec.structs.replace(result, detail={}))
        with self._connection:
            self._connection.execute(
                "UPDATE command SET acknowledged = 1, message = '', result = ? WHERE number = ? AND state = 'done'",
                (brief, number),
            )
            self._connection.execute(
                "DELETE FROM command WHERE seq <= (SELECT max(seq) FROM command) - CASE WHEN acknowledged"
                f" THEN {KEPT} ELSE {LIMIT} END AND state <> 'started'"
            )

    def interrupted(self) -> list[tuple[wire.Command, str]]:
        """Return the commands that were started and have not ended, each with the boot id at its start."""
        rows = self._connection.execute("SELECT message, boot FROM command WHERE state = 'started' ORDER BY number")
        return [(command, boot) for text, boot in rows.fetchall() if (command := _decoded(text, wire.Command))]

    def forget_waiting(self) -> None:
        """Delete the commands that were not started: after a restart the gateway sends them again, with new times."""
        self._write("DELETE FROM command WHERE state = 'received'")

    def apply(self, applied: Applied) -> None:
        """Store an effect on the host as the last one in the order; it replaces the entry of the same slot."""
        with self._connection:
            self._drop(applied.driver, applied.key, applied.slot)
            self._connection.execute(
                "INSERT INTO applied (driver, key, slot, ask, boot) VALUES (?, ?, ?, ?, ?)",
                (applied.driver, applied.key, applied.slot, msgspec.json.encode(applied.ask).decode(), applied.boot),
            )

    def still(self, applied: Applied, boot: str) -> None:
        """Note that the effect was restored, or still holds, in this boot. Its place in the order stays."""
        self._write(
            "UPDATE applied SET boot = ? WHERE driver = ? AND key = ? AND slot = ?",
            (boot, applied.driver, applied.key, applied.slot),
        )

    def remove(self, driver: str, key: str, *slots: str) -> None:
        """Delete these slots of a device, because their effects are gone from the host."""
        with self._connection:
            for slot in slots:
                self._drop(driver, key, slot)

    def applied(self) -> list[Applied]:
        """Return all stored effects, in the order in which they were made; unreadable ones are logged and left out."""
        rows = self._connection.execute("SELECT driver, key, slot, ask, boot FROM applied ORDER BY seq").fetchall()
        asked = [(row, _decoded(row[3], Ask)) for row in rows]
        return [Applied(driver, key, slot, ask, boot) for (driver, key, slot, _, boot), ask in asked if ask]

    def attachments(self, driver: str, key: str) -> dict[str, str]:
        """Return handle uuid → consumer for all handles of the device that are, or may be, attached."""
        slots = (one for one in self.applied() if (one.driver, one.key) == (driver, key))
        return {one.ask.uuid: one.ask.consumer for one in slots if one.slot.startswith(ATTACH)}

    def attached(self, driver: str) -> Applied | None:
        """Return one handle of the driver that is, or may be, attached; None when there is none."""
        mine = (one for one in self.applied() if one.driver == driver and one.slot.startswith(ATTACH))
        return next(mine, None)

    def note_first(self, driver: str, key: str, path: str, value: str) -> None:
        """Store what a file held before its first write for this device; a value that is stored already stays."""
        self._write("INSERT INTO first VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", (driver, key, path, value))

    def first(self, driver: str, key: str) -> dict[str, str]:
        """Return path → value before the agent's first write, for this device."""
        rows = self._connection.execute("SELECT path, value FROM first WHERE driver = ? AND key = ?", (driver, key))
        return dict(rows.fetchall())

    def forget_first(self, driver: str, key: str) -> None:
        """Delete the stored first values of a device, because `uninstall` has restored them."""
        self._write("DELETE FROM first WHERE driver = ? AND key = ?", (driver, key))

    def _drop(self, driver: str, key: str, slot: str) -> None:
        self._connection.execute("DELETE FROM applied WHERE (driver, key, slot) = (?, ?, ?)", (driver, key, slot))

    def _one(self, statement: str, *values: Any) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._connection.execute(statement, values).fetchone()
        return row

    def _write(self, statement: str, values: tuple[Any, ...] = ()) -> None:
        with self._connection:
            self._connection.execute(statement, values)


def _decoded(text: str, kind: type[T]) -> T | None:
    """Decode JSON from the journal; log and return None when it cannot be decoded.

    Another release may have written it in another form, and that must not keep the agent from starting.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        log.error("the journal holds a %s that this release cannot read (%s): it is ignored", kind.__name__, error)
        return None
