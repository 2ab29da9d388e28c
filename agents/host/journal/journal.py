"""What the agent must not forget, in SQLite on the host: epoch, last report, gateway in one row; commands in `ledger`,
what is wanted of drivers in `wishes`.

Owned by `main`: `report` writes what was seen, `link` what the gateway acknowledged. Every change is one transaction in
WAL mode with synchronous=FULL, so a restart, kill -9 or power cut at any write leaves the row as some commit left it.
Calls block for one fsync; they are rare (a changed inventory, its acknowledgement, a new gateway, a command's steps).

(`epoch`, `seq`) never names two contents: the epoch goes up at every start, the sequence at every change.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from agents import wire
from agents.host.journal import command_log, desired_drivers
from drivers.files import sync_directory
from drivers.inventory import DriverReport

log = logging.getLogger("cyborg.journal")

FILE = "journal.sqlite3"
SCHEMA = 2
"""1 had no commands; it is brought up in place. A table that an older release may ignore (`wishes`) needs no other."""
EPOCH_LIMIT = 2**53
"""The wire's bound for an epoch; nobody gets there honestly."""

_TABLE = """
CREATE TABLE journal (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    host TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    seq INTEGER NOT NULL DEFAULT 0,
    hash TEXT NOT NULL DEFAULT '',
    content BLOB NOT NULL DEFAULT x'',
    acknowledged INTEGER NOT NULL DEFAULT 0,
    address TEXT NOT NULL DEFAULT '',
    fingerprint TEXT NOT NULL DEFAULT '',
    joined_with TEXT NOT NULL DEFAULT ''
) STRICT
"""
_contents = msgspec.json.Decoder(tuple[DriverReport, ...])


class Corrupt(Exception):
    """The file is not a journal any more, or was written by another release."""


class WrongHost(Exception):
    """The journal belongs to another host. The text is a sentence for the operator."""


class Journal:
    """The open journal.

    Every writing method raises sqlite3.OperationalError when the disk is full or read-only.
    """

    def __init__(self, connection: sqlite3.Connection, row: dict[str, Any]) -> None:
        self._connection = connection
        self.ledger = command_log.Ledger(connection)
        self.wishes = desired_drivers.Wishes(connection)
        self.host: str = row["host"]
        self.epoch: int = row["epoch"]
        self.seq: int = row["seq"]
        self.address: str = row["address"]
        self.fingerprint: str = row["fingerprint"]
        self._joined_with: str = row["joined_with"]
        self.acknowledged = bool(row["acknowledged"])
        drivers = _decoded(row) if row["hash"] else None
        self.report = self._stamped(row["hash"], drivers) if drivers is not None else None

    def close(self) -> None:
        """Ends the connection; what was committed stays."""
        self._connection.close()

    def record(self, drivers: tuple[DriverReport, ...]) -> bool:
        """A new report under the next seq, durable on return; False when the content is the last one's."""
        digest = wire.content_hash(drivers)
        if self.report is not None and self.report.hash == digest:
            return False
        content = msgspec.json.encode(drivers)
        self._write(seq=self.seq + 1, hash=digest, content=content, acknowledged=0)
        self._became(self.seq + 1, digest, drivers)
        return True

    def offer_again(self, report: wire.Report) -> wire.Report:
        """The last report's content under the next seq: it was acknowledged once and is no longer applied."""
        self._write(seq=self.seq + 1, acknowledged=0)
        self._became(self.seq + 1, report.hash, report.told)
        return self._stamped(report.hash, report.told)

    def acknowledge(self, seq: int) -> None:
        """The gateway will not lose report `seq` of this epoch. Nothing when a newer one has been recorded.

        Known in memory even when the disk refuses: forgetting it costs one more report after a restart, no
        more.
        """
        if self.report is not None and self.report.seq == seq and not self.acknowledged:
            self.acknowledged = True
            self._write(acknowledged=1)

    def raise_epoch(self, at_least: int) -> None:
        """Move above an epoch that the gateway has seen.

        Raises ValueError for one that cannot be moved above.
        """
        if at_least + 1 >= EPOCH_LIMIT:
            raise ValueError(f"the gateway claims to have seen epoch {at_least}, which is out of range")
        epoch = max(self.epoch, at_least + 1)
        self._write(epoch=epoch)
        self.epoch = epoch
        if self.report is not None:
            self.report = self._stamped(self.report.hash, self.report.told)

    def joined(self, address: str, fingerprint: str, secret: str) -> None:
        """The gateway at `address` let us in with this secret ('' when none was needed): remember the way."""
        digest = _digest(secret) if secret else self._joined_with
        if (address, fingerprint, digest) != (self.address, self.fingerprint, self._joined_with):
            self._write(address=address, fingerprint=fingerprint, joined_with=digest)
            self.address, self.fingerprint, self._joined_with = address, fingerprint, digest

    def has_joined_with(self, secret: str) -> bool:
        """Whether this very join token has done its work."""
        return self._joined_with == _digest(secret)

    def _became(self, seq: int, digest: str, drivers: tuple[DriverReport, ...]) -> None:
        self.seq, self.acknowledged = seq, False
        self.report = self._stamped(digest, drivers)

    def _stamped(self, digest: str, drivers: tuple[DriverReport, ...]) -> wire.Report:
        return wire.Report.of(self.epoch, self.seq, digest, drivers)

    def _write(self, **columns: Any) -> None:
        changes = ", ".join(f"{name} = ?" for name in columns)
        with self._connection:
            self._connection.execute(f"UPDATE journal SET {changes} WHERE id = 1", tuple(columns.values()))


def open_journal(directory: Path, host: str, clock: Callable[[], float] = time.time) -> Journal:
    """Open or begin the journal of `host` in an epoch above all earlier ones, which is then on disk.

    A corrupt file is kept under another name and a new journal begun: its epoch comes from the clock, so it
    lies above the lost one's. Raises WrongHost, and sqlite3.OperationalError while the disk takes no write.
    """
    path = directory / FILE
    try:
        return _open(path, host, clock)
    except Corrupt as error:
        kept = _move_aside(path, int(clock()))
        log.error("the journal %s is unreadable (%s): kept as %s, a new one is begun", path, error, kept.name)
        return _open(path, host, clock)


def known_host(directory: Path) -> str:
    """The host that the journal in `directory` belongs to, '' when there is none or it cannot be read."""
    path = directory / FILE
    if not path.exists():
        return ""
    try:
        connection = sqlite3.connect(path)
        try:
            row = connection.execute("SELECT host FROM journal").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        log.debug("%s names no host: %s", path, error)
        return ""
    return str(row[0]) if row else ""


def _open(path: Path, host: str, clock: Callable[[], float]) -> Journal:
    _touch(path)
    connection = sqlite3.connect(path, isolation_level="IMMEDIATE")
    try:
        with connection:
            _prepare(connection)
            row = _row(connection)
            if row and row["host"] != host and row["address"]:  # never joined: the name was not used yet
                raise WrongHost(
                    f"the state directory {path.parent} belongs to the host {row['host']}, this one is "
                    f"{host}: give each host its own CYBORG_AGENT_STATE_DIR, or move that one away and join anew"
                )
            epoch = max(row["epoch"] + 1 if row else 1, int(clock()))
            connection.execute(
                "INSERT INTO journal (id, host, epoch) VALUES (1, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET host = excluded.host, epoch = excluded.epoch",
                (host, epoch),
            )
        row = _row(connection)
        if row is None:
            raise Corrupt("its row is gone")
        return Journal(connection, row)
    except sqlite3.OperationalError:
        connection.close()
        raise
    except sqlite3.DatabaseError as error:
        connection.close()
        raise Corrupt(str(error)) from None
    except BaseException:
        connection.close()
        raise


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise Corrupt(str(verdict))
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not 0 <= version <= SCHEMA:
        raise Corrupt(f"its format is {version}, this release writes {SCHEMA}")
    connection.execute("BEGIN IMMEDIATE")
    if version == 0:
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
            raise Corrupt("it holds something else")
        connection.execute(_TABLE)
    if version < 2:
        for statement in command_log.TABLES.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
    connection.execute(desired_drivers.TABLE)


def _row(connection: sqlite3.Connection) -> dict[str, Any] | None:
    cursor = connection.execute("SELECT * FROM journal")
    row = cursor.fetchone()
    return dict(zip([column[0] for column in cursor.description], row, strict=True)) if row else None


def _decoded(row: dict[str, Any]) -> tuple[DriverReport, ...] | None:
    # Another release may have other fields, and so another hash: forgetting costs one report more, no more.
    try:
        drivers = _contents.decode(row["content"])
    except msgspec.DecodeError as error:
        log.warning("the last report in the journal is not readable (%s): the next look makes a new one", error)
        return None
    return drivers if wire.content_hash(drivers) == row["hash"] else None


def _touch(path: Path) -> None:
    # SQLite gives its -wal and -shm files the mode of the database: it must be private before the first byte.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        path.chmod(0o600)
    else:
        sync_directory(path.parent)


def _move_aside(path: Path, now: int) -> Path:
    kept = path.with_name(f"{path.name}.corrupt-{now}")
    count = 0
    while kept.exists():
        count += 1
        kept = path.with_name(f"{path.name}.corrupt-{now}.{count}")
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(kept.with_name(kept.name + suffix))
    sync_directory(path.parent)
    return kept


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
