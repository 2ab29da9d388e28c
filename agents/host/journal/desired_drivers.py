"""What the conductor wants of this host's drivers: the journal's table of wishes. It holds without the conductor, too.

Part of `journal.Journal`; read and written by `roster`. A wish is durable before the driver is run by it.
"""

from __future__ import annotations

import logging
import sqlite3

import msgspec

from agents import wire

log = logging.getLogger("cyborg.journal")

TABLE = "CREATE TABLE IF NOT EXISTS wish (driver TEXT PRIMARY KEY, wish TEXT NOT NULL) STRICT"
"""No other format of the journal: a release from before it goes on with the rest, the attachments above all."""


class Wishes:
    """The open table, by driver in the order in which they were first named."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._known: dict[str, wire.Wish] = {}
        for driver, text in connection.execute("SELECT driver, wish FROM wish ORDER BY rowid").fetchall():
            try:
                self._known[driver] = msgspec.json.decode(text, type=wire.Wish)
            except msgspec.DecodeError as error:
                log.error("the journal holds a wish for %s that cannot be read (%s): left aside", driver, error)

    def get(self, driver: str) -> wire.Wish | None:
        """The last one for this driver; None: the host's own configuration decides."""
        return self._known.get(driver)

    def drivers(self) -> tuple[str, ...]:
        """Those there is a wish for."""
        return tuple(self._known)

    def keep(self, driver: str, wish: wire.Wish) -> None:
        """From here on it is this one. Raises sqlite3.OperationalError when the disk is full or read-only."""
        text = msgspec.json.encode(wish).decode()
        with self._connection:
            self._connection.execute(
                "INSERT INTO wish VALUES (?, ?) ON CONFLICT (driver) DO UPDATE SET wish = excluded.wish", (driver, text)
            )
        self._known[driver] = wish
