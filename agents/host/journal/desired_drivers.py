"""The journal's table of desired states (`wire.Wish`): which drivers the conductor wants here, with which settings.

A desired state stays in force while the conductor is away. It is durable before the driver runs according to it.
"""

from __future__ import annotations

import logging
import sqlite3

import msgspec

from agents import wire

log = logging.getLogger("cyborg.journal")

CREATE_DESIRED_STATE_TABLE = "CREATE TABLE IF NOT EXISTS wish (driver TEXT PRIMARY KEY, wish TEXT NOT NULL) STRICT"
"""SQL that creates the table in any journal.

The journal's version stays the same, so that a release that does not know this table can still open the journal and
keeps the rest, above all the attachments.
"""


class DesiredDrivers:
    """Access to the table of desired states: one per driver, in the order in which the drivers were first named."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._desired_states: dict[str, wire.Wish] = {}
        for driver, text in connection.execute("SELECT driver, wish FROM wish ORDER BY rowid").fetchall():
            try:
                self._desired_states[driver] = msgspec.json.decode(text, type=wire.Wish)
            except msgspec.DecodeError as error:
                log.error(
                    "the journal holds a wanted state of %s that cannot be read (%s): it is ignored", driver, error
                )

    def get_desired_state(self, driver: str) -> wire.Wish | None:
        """Return the driver's last desired state; None when there is none and the host's own configuration decides."""
        return self._desired_states.get(driver)

    def list_drivers(self) -> tuple[str, ...]:
        """Return the drivers for which the conductor has set a desired state."""
        return tuple(self._desired_states)

    def store_desired_state(self, driver: str, desired_state: wire.Wish) -> None:
        """Store the desired state in place of the driver's former one; it is durable when this returns.

        Raises sqlite3.OperationalError when the disk is full or read-only.
        """
        text = msgspec.json.encode(desired_state).decode()
        with self._connection:
            self._connection.execute(
                "INSERT INTO wish VALUES (?, ?) ON CONFLICT (driver) DO UPDATE SET wish = excluded.wish", (driver, text)
            )
        self._desired_states[driver] = desired_state
