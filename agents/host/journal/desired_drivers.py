"""The journal's table of wishes (`wire.Wish`): which drivers the conductor wants on this host, with which settings.

A wish stays in force while the conductor is away. It is durable before the driver runs according to it.
"""

from __future__ import annotations

import logging
import sqlite3

import msgspec

from agents import wire

log = logging.getLogger("cyborg.journal")

CREATE_WISH_TABLE = "CREATE TABLE IF NOT EXISTS wish (driver TEXT PRIMARY KEY, wish TEXT NOT NULL) STRICT"
"""SQL that creates the table in any journal.

The journal's version stays the same, so that a release that does not know this table can still open the journal and
keeps the rest, above all the attachments.
"""


class DesiredDrivers:
    """Access to the table of wishes: one per driver, in the order in which the drivers were first named."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._wishes: dict[str, wire.Wish] = {}
        for driver, text in connection.execute("SELECT driver, wish FROM wish ORDER BY rowid").fetchall():
            try:
                self._wishes[driver] = msgspec.json.decode(text, type=wire.Wish)
            except msgspec.DecodeError as error:
                log.error(
                    "the journal holds a wanted state of %s that cannot be read (%s): it is ignored", driver, error
                )

    def get_wish(self, driver: str) -> wire.Wish | None:
        """Return the last wish for the driver; None when there is none and the host's own configuration decides."""
        return self._wishes.get(driver)

    def list_drivers(self) -> tuple[str, ...]:
        """Return the drivers for which the conductor has set a desired state."""
        return tuple(self._wishes)

    def store_wish(self, driver: str, wish: wire.Wish) -> None:
        """Store the wish in place of the driver's former one; it is durable when this returns.

        Raises sqlite3.OperationalError when the disk is full or read-only.
        """
        text = msgspec.json.encode(wish).decode()
        with self._connection:
            self._connection.execute(
                "INSERT INTO wish VALUES (?, ?) ON CONFLICT (driver) DO UPDATE SET wish = excluded.wish", (driver, text)
            )
        self._wishes[driver] = wish
