"""What this agent was told to do and what it did to the host: the journal's tables of commands.

Part of `journal.Journal`; written by `executor` and `recovery`, its results read by `link`. As there, every change is
one durable transaction and comes before what it speaks of: a command's row before its `Taken`, *started* before the
first touch, a file's first value before its first write, *done* before the `Result` is sent.
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
"""Commands that are remembered once they are acknowledged, so that each runs once; and of all kinds."""
ATTACH = "attach:"
"""The slot of an attachment is this with the handle's uuid; other slots are the names of acts."""

State = Literal["new", "received", "started", "done"]


@dataclass(frozen=True)
class Applied:
    """An act that is to stay: asked of the driver again after a reboot, in the order of the list.

    `boot` names the boot of the host in which it was done. '' for what was begun and is not known to be done: an
    attachment counts as one from before its first step until it is surely gone (promise S3).
    """

    driver: str
    key: str
    slot: str
    ask: Ask
    boot: str


class Ledger:
    """The open tables. Every writing method raises sqlite3.OperationalError when the disk is full or read-only."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.owed: dict[int, wire.Result] = {}
        """Results that the gateway has not acknowledged yet, by command number."""
        for number, text in connection.execute(
            "SELECT number, result FROM command WHERE state = 'done' AND NOT acknowledged ORDER BY number"
        ):
            if result := _decoded(text, wire.Result):
                self.owed[number] = result

    def hear(self, command: wire.Command) -> State:
        """Keep a command that is not known yet; what it was before. One that is done owes its result once more."""
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
        """From here on it is never run again, whatever happens."""
        self._write("UPDATE command SET state = 'started', boot = ? WHERE id = ?", (boot, command.id))

    def end(self, command: wire.Command, result: wire.Result) -> None:
        """It is done, and its result is owed."""
        self._write("UPDATE command SET state = 'done', result = ? WHERE id = ?", (wire.encode(result), command.id))
        self.owed[command.number] = result

    def acknowledge(self, number: int) -> None:
        """The gateway has this result for good. Its id is kept for a while, so that the command is known again."""
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
        """Commands that were begun and never ended, each with the boot it was begun in."""
        rows = self._connection.execute("SELECT message, boot FROM command WHERE state = 'started' ORDER BY number")
        return [(command, boot) for text, boot in rows.fetchall() if (command := _decoded(text, wire.Command))]

    def forget_waiting(self) -> None:
        """Drop what was not begun: an agent that has just started is sent that again, with new deadlines."""
        self._write("DELETE FROM command WHERE state = 'received'")

    def apply(self, applied: Applied) -> None:
        """Note what is (about to be) so; the last one noted is put back last."""
        with self._connection:
            self._drop(applied.driver, applied.key, applied.slot)
            self._connection.execute(
                "INSERT INTO applied (driver, key, slot, ask, boot) VALUES (?, ?, ?, ?, ?)",
                (applied.driver, applied.key, applied.slot, msgspec.json.encode(applied.ask).decode(), applied.boot),
            )

    def still(self, applied: Applied, boot: str) -> None:
        """It is so again in this boot; its place in the order stays."""
        self._write(
            "UPDATE applied SET boot = ? WHERE driver = ? AND key = ? AND slot = ?",
            (boot, applied.driver, applied.key, applied.slot),
        )

    def remove(self, driver: str, key: str, *slots: str) -> None:
        """Not so any more."""
        with self._connection:
            for slot in slots:
                self._drop(driver, key, slot)

    def applied(self) -> list[Applied]:
        """Everything that is to stay, in the order it was done."""
        rows = self._connection.execute("SELECT driver, key, slot, ask, boot FROM applied ORDER BY seq").fetchall()
        asked = [(row, _decoded(row[3], Ask)) for row in rows]
        return [Applied(driver, key, slot, ask, boot) for (driver, key, slot, _, boot), ask in asked if ask]

    def attachments(self, driver: str, key: str) -> dict[str, str]:
        """Handle uuid → consumer of this device's handles that somebody has, or may have."""
        slots = (one for one in self.applied() if (one.driver, one.key) == (driver, key))
        return {one.ask.uuid: one.ask.consumer for one in slots if one.slot.startswith(ATTACH)}

    def attached(self, driver: str) -> Applied | None:
        """One of the driver's handles that somebody has, or may have; None when there is none."""
        mine = (one for one in self.applied() if one.driver == driver and one.slot.startswith(ATTACH))
        return next(mine, None)

    def note_first(self, driver: str, key: str, path: str, value: str) -> None:
        """What a file held before it was first written for this device; nothing when that is known."""
        self._write("INSERT INTO first VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", (driver, key, path, value))

    def first(self, driver: str, key: str) -> dict[str, str]:
        """Path → value before our first write."""
        rows = self._connection.execute("SELECT path, value FROM first WHERE driver = ? AND key = ?", (driver, key))
        return dict(rows.fetchall())

    def forget_first(self, driver: str, key: str) -> None:
        """The device is as it was found."""
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
    """What another release wrote may not be readable; that must not keep the agent from starting."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        log.error("the journal holds a %s that this release cannot read (%s): left aside", kind.__name__, error)
        return None
