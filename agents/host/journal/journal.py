"""The agent's durable state, in an SQLite file on the host.

One row holds the epoch, the last report and the gateway; other tables hold the commands (`command_log`), the drivers
that the conductor wants (`desired_drivers`), the identities of PCI devices (`drivers.pci.identity`) and announcements
of certificates (`agents.certificates`). Every change is one transaction in WAL mode with synchronous=FULL, so after a
restart, kill -9 or power cut at any write the row is as some commit left it. Each write blocks for one fsync; writes
are rare (a changed inventory, its acknowledgement, a new gateway, a command's steps).

One pair (`epoch`, `seq`) never names two contents: the epoch rises at every start, the seq at every change.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agents import wire
from agents.errors import AgentsError
from agents.host.journal import command_log, desired_drivers
from drivers.files import sync_directory
from drivers.inventory import DriverReport
from drivers.pci.identity import Identities, RememberedIdentity

T = TypeVar("T")

log = logging.getLogger("cyborg.journal")

JOURNAL_FILE = "journal.sqlite3"
SCHEMA_VERSION = 2
"""Version of the file's format. Version 1 had no tables of commands; such a file is upgraded in place.

A new table that an older release may ignore, such as the one of desired states, does not need a new version.
"""
EPOCH_LIMIT = 2**53
"""Upper bound of an epoch in messages; only a faulty gateway names one as high as that."""

_CREATE_JOURNAL_TABLE = """
CREATE TABLE journal (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    host TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    seq INTEGER NOT NULL DEFAULT 0,
    hash TEXT NOT NULL DEFAULT '',
    content BLOB NOT NULL DEFAULT x'',
    acknowledged INTEGER NOT NULL DEFAULT 0,
    boot TEXT NOT NULL DEFAULT '',
    address TEXT NOT NULL DEFAULT '',
    fingerprint TEXT NOT NULL DEFAULT '',
    joined_with TEXT NOT NULL DEFAULT ''
) STRICT
"""
_ADD_BOOT_COLUMN = "ALTER TABLE journal ADD COLUMN boot TEXT NOT NULL DEFAULT ''"
"""Adds the boot id of the last report to a journal of an older release, which then ignores the column."""
_CREATE_IDENTITY_TABLE = """
CREATE TABLE IF NOT EXISTS identity (
    address TEXT PRIMARY KEY,
    key TEXT NOT NULL,
    read TEXT NOT NULL,
    hardware TEXT NOT NULL
) STRICT
"""
_CREATE_CERTIFICATES_TABLE = """
CREATE TABLE IF NOT EXISTS certificates (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    announcement_key TEXT NOT NULL,
    announcements TEXT NOT NULL
) STRICT
"""
_announcements_decoder = msgspec.json.Decoder(tuple[wire.CertificateAnnouncement, ...])
_content_decoder = msgspec.json.Decoder(tuple[DriverReport, ...])


class JournalCorruptError(AgentsError):
    """The file is damaged, is not a journal, or has the format of a later release."""


class WrongHostError(AgentsError):
    """The journal belongs to another host. The text is a sentence for the operator."""


@dataclass(frozen=True)
class KnownGateway:
    """The gateway that the host has joined, as the journal has it; each field is empty if it is not known.

    `fingerprint` is that of the certificate that was pinned first. The signatures of the `announcements` were checked
    before they were stored; whoever reads them checks them again.
    """

    address: str = ""
    fingerprint: str = ""
    announcement_key: str = ""
    announcements: tuple[wire.CertificateAnnouncement, ...] = ()


class Journal:
    """The open journal; `command_log` and `desired_drivers` give access to its other tables.

    `report` is the last report, None when there is none or it cannot be read; `acknowledged` says whether the gateway
    has it. `boot_id` is the host's boot id, which goes into new reports; '' until it is set. `identities` has what was
    read once of the device at each PCI address. Every writing method raises sqlite3.OperationalError when the disk is
    full or read-only.
    """

    def __init__(self, connection: sqlite3.Connection, row: dict[str, Any]) -> None:
        self._connection = connection
        self.command_log = command_log.CommandLog(connection)
        self.desired_drivers = desired_drivers.DesiredDrivers(connection)
        self.host: str = row["host"]
        self.epoch: int = row["epoch"]
        self.seq: int = row["seq"]
        self.gateway = _fetch_known_gateway(connection)
        self.boot_id = ""
        self._token_digest: str = row["joined_with"]
        self.identities: Identities = {
            address: RememberedIdentity(*columns)
            for address, *columns in connection.execute("SELECT address, key, read, hardware FROM identity")
        }
        self.acknowledged = bool(row["acknowledged"])
        drivers = _decode_content(row) if row["hash"] else None
        self.report = self._build_report(row["hash"], drivers, row["boot"]) if drivers is not None else None

    def close(self) -> None:
        """Close the file; everything committed stays."""
        self._connection.close()

    def record_report(self, drivers: tuple[DriverReport, ...]) -> bool:
        """Store a new report under the next seq, unacknowledged; it is durable when this returns True.

        Return False, and store nothing, when the content is the same as in the last report. The boot id is part of it.
        """
        digest = wire.hash_report_content(drivers, self.boot_id)
        if self.report is not None and self.report.hash == digest:
            return False
        content = msgspec.json.encode(drivers)
        self._update_row(seq=self.seq + 1, hash=digest, content=content, acknowledged=0, boot=self.boot_id)
        self._set_current_report(self.seq + 1, digest, drivers, self.boot_id)
        return True

    def store_identities(self, identities: Identities) -> None:
        """Store the identities of PCI devices, in place of the former ones; writes only when something differs."""
        if identities == self.identities:
            return
        rows = [(address, one.key, one.read, one.hardware) for address, one in identities.items()]
        with self._connection:
            self._connection.execute("DELETE FROM identity")
            self._connection.executemany("INSERT INTO identity VALUES (?, ?, ?, ?)", rows)
        self.identities = dict(identities)

    def renumber_report(self, report: wire.Report) -> wire.Report:
        """Store the last report's content under the next seq, unacknowledged, and return that report.

        Needed when the report was acknowledged and the gateway no longer has its content as the applied one.
        """
        self._update_row(seq=self.seq + 1, acknowledged=0)
        return self._set_current_report(self.seq + 1, report.hash, report.all_drivers, report.boot_id)

    def acknowledge_report(self, seq: int) -> None:
        """Record that the gateway has stored report `seq`; do nothing if that is not the last report recorded here.

        Raises sqlite3.OperationalError if the disk takes no write; `acknowledged` is True all the same. The report is
        then sent once more after a restart, which does no harm.
        """
        if self.report is not None and self.report.seq == seq and not self.acknowledged:
            self.acknowledged = True
            self._update_row(acknowledged=1)

    def raise_epoch(self, at_least: int) -> None:
        """Raise this journal's epoch above `at_least`, an epoch that the gateway has seen.

        Raises ValueError when `at_least` is too close to EPOCH_LIMIT.
        """
        if at_least + 1 >= EPOCH_LIMIT:
            raise ValueError(f"the gateway claims to have seen epoch {at_least}, which is out of range")
        epoch = max(self.epoch, at_least + 1)
        self._update_row(epoch=epoch)
        self.epoch = epoch
        if self.report is not None:
            self.report = self._build_report(self.report.hash, self.report.all_drivers, self.report.boot_id)

    def store_gateway(self, address: str, fingerprint: str, secret: str) -> None:
        """Store the gateway's address and fingerprint, and a digest of the token's secret that it accepted.

        `secret` is '' when no token was needed; the former digest then stays. Writes only when something differs.
        """
        digest = _hash_secret(secret) if secret else self._token_digest
        if (address, fingerprint, digest) != (self.gateway.address, self.gateway.fingerprint, self._token_digest):
            self._update_row(address=address, fingerprint=fingerprint, joined_with=digest)
            self.gateway = replace(self.gateway, address=address, fingerprint=fingerprint)
            self._token_digest = digest

    def store_announcements(
        self, announcement_key: str, announcements: tuple[wire.CertificateAnnouncement, ...]
    ) -> None:
        """Store the announcement key and the announcements of certificates, in place of the former ones.

        Writes only when something differs. Their signatures must have been checked.
        """
        known = replace(self.gateway, announcement_key=announcement_key, announcements=announcements)
        if known == self.gateway:
            return
        with self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO certificates VALUES (1, ?, ?)",
                (announcement_key, msgspec.json.encode(announcements).decode()),
            )
        self.gateway = known

    def has_joined_with(self, secret: str) -> bool:
        """Return whether this join token is the one that was used last, so that it need not be sent again."""
        return self._token_digest == _hash_secret(secret)

    def _set_current_report(
        self, seq: int, digest: str, drivers: tuple[DriverReport, ...], boot_id: str
    ) -> wire.Report:
        """Make this content the current report, unacknowledged, in memory only: the caller has stored it. Return it."""
        self.seq, self.acknowledged = seq, False
        self.report = report = self._build_report(digest, drivers, boot_id)
        return report

    def _build_report(self, digest: str, drivers: tuple[DriverReport, ...], boot_id: str) -> wire.Report:
        """Return a Report message with the journal's present epoch and seq; nothing is stored."""
        return wire.Report.from_driver_reports(self.epoch, self.seq, digest, drivers, boot_id)

    def _update_row(self, **columns: Any) -> None:
        """Set these columns of the journal's only row in one transaction. Raises sqlite3.OperationalError."""
        changes = ", ".join(f"{name} = ?" for name in columns)
        with self._connection:
            self._connection.execute(f"UPDATE journal SET {changes} WHERE id = 1", tuple(columns.values()))


def open_journal(directory: Path, host: str, clock: Callable[[], float] = time.time) -> Journal:
    """Open or create the journal of `host`, with a new epoch above all earlier ones; that epoch is then on disk.

    A corrupt file is renamed and kept, and a new journal is created. Its epoch comes from the clock (seconds), so that
    it is above the lost one. Raises WrongHostError, and sqlite3.OperationalError while the disk takes no write.
    """
    path = directory / JOURNAL_FILE
    try:
        return _open_file(path, host, clock)
    except JournalCorruptError as error:
        kept_file = _rename_corrupt_file(path, int(clock()))
        log.error(
            "the journal %s cannot be read (%s): it is kept as %s, and a new one is created",
            path,
            error,
            kept_file.name,
        )
        return _open_file(path, host, clock)


def read_known_host(directory: Path) -> str:
    """Return the host that the journal in `directory` belongs to, '' when there is no readable journal."""
    return _read_file(directory, lambda connection: str(_fetch_journal_column(connection, "host")), "")


def read_known_gateway(directory: Path) -> KnownGateway:
    """Return the gateway that the host has joined, from the journal in `directory`."""
    return _read_file(directory, _fetch_known_gateway, KnownGateway())


def _read_file(directory: Path, fetch: Callable[[sqlite3.Connection], T], default: T) -> T:
    """Return what `fetch` reads from the journal in `directory`; `default` when there is no readable journal."""
    path = directory / JOURNAL_FILE
    if not path.exists():
        return default
    try:
        connection = sqlite3.connect(path)
        try:
            return fetch(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        log.debug("%s cannot be read: %s", path, error)
        return default


def _fetch_journal_column(connection: sqlite3.Connection, column: str) -> Any:
    """Return a column of the journal's only row; '' when it has none."""
    row = connection.execute(f"SELECT {column} FROM journal").fetchone()
    return row[0] if row else ""


def _fetch_known_gateway(connection: sqlite3.Connection) -> KnownGateway:
    """Return the gateway that the journal remembers. Announcements that this release cannot read are left out."""
    address, fingerprint = (str(_fetch_journal_column(connection, column)) for column in ("address", "fingerprint"))
    has_table = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'certificates'").fetchone()
    row = (
        connection.execute("SELECT announcement_key, announcements FROM certificates").fetchone() if has_table else None
    )
    if row is None:
        return KnownGateway(address, fingerprint)
    try:
        announcements = _announcements_decoder.decode(row[1])
    except msgspec.DecodeError as error:
        log.warning("the announcements of certificates in the journal cannot be read (%s)", error)
        announcements = ()
    return KnownGateway(address, fingerprint, str(row[0]), announcements)


def _open_file(path: Path, host: str, clock: Callable[[], float]) -> Journal:
    """Open or create the file and store its new epoch.

    Raises JournalCorruptError, WrongHostError and sqlite3.OperationalError.
    """
    _create_private_file(path)
    connection = sqlite3.connect(path, isolation_level="IMMEDIATE")
    try:
        with connection:
            _prepare_schema(connection)
            row = _fetch_journal_row(connection)
            if row and row["host"] != host and row["address"]:  # without an address it never joined: it may be renamed
                raise WrongHostError(
                    f"the state directory {path.parent} belongs to the host {row['host']}, this one is "
                    f"{host}: give each host its own CYBORG_AGENT_STATE_DIR, or move that directory away and join again"
                )
            epoch = max(row["epoch"] + 1 if row else 1, int(clock()))
            connection.execute(
                "INSERT INTO journal (id, host, epoch) VALUES (1, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET host = excluded.host, epoch = excluded.epoch",
                (host, epoch),
            )
        row = _fetch_journal_row(connection)
        if row is None:
            raise JournalCorruptError("it has no row")
        return Journal(connection, row)
    except sqlite3.OperationalError:
        connection.close()
        raise
    except sqlite3.DatabaseError as error:
        connection.close()
        raise JournalCorruptError(str(error)) from None
    except BaseException:
        connection.close()
        raise


def _prepare_schema(connection: sqlite3.Connection) -> None:
    """Check the file, create or upgrade its tables, and leave the transaction open. Raises JournalCorruptError."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    (check_result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if check_result != "ok":
        raise JournalCorruptError(str(check_result))
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not 0 <= version <= SCHEMA_VERSION:
        raise JournalCorruptError(f"its format is version {version}, and this release supports up to {SCHEMA_VERSION}")
    connection.execute("BEGIN IMMEDIATE")
    if version == 0:
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
            raise JournalCorruptError("it is a database of another program")
        connection.execute(_CREATE_JOURNAL_TABLE)
    if version < 2:
        for statement in command_log.CREATE_COMMAND_TABLES.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    if "boot" not in [column[1] for column in connection.execute("PRAGMA table_info(journal)")]:
        connection.execute(_ADD_BOOT_COLUMN)
    connection.execute(desired_drivers.CREATE_DESIRED_STATE_TABLE)
    connection.execute(_CREATE_IDENTITY_TABLE)
    connection.execute(_CREATE_CERTIFICATES_TABLE)


def _fetch_journal_row(connection: sqlite3.Connection) -> dict[str, Any] | None:
    """Return the journal's only row by column name, None when it has none."""
    cursor = connection.execute("SELECT * FROM journal")
    row = cursor.fetchone()
    return dict(zip([column[0] for column in cursor.description], row, strict=True)) if row else None


def _decode_content(row: dict[str, Any]) -> tuple[DriverReport, ...] | None:
    """Return the last report's content; None when this release cannot decode it or computes another hash for it."""
    # Another release may have other fields, and so another hash. Losing the report only costs sending one more.
    try:
        drivers = _content_decoder.decode(row["content"])
    except msgspec.DecodeError as error:
        log.warning(
            "the last report in the journal cannot be read (%s): a new one is made when the drivers have answered",
            error,
        )
        return None
    return drivers if wire.hash_report_content(drivers, row["boot"]) == row["hash"] else None


def _create_private_file(path: Path) -> None:
    """Create an empty file that only its owner can use; give it that mode (0600) if it exists already. Raises
    OSError."""
    # SQLite gives its -wal and -shm files the mode of the database file, so that must be private from the beginning.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        path.chmod(0o600)
    else:
        sync_directory(path.parent)


def _rename_corrupt_file(path: Path, now: int) -> Path:
    """Rename the file, with its -wal and -shm, to a free name; return that name."""
    kept_file = path.with_name(f"{path.name}.corrupt-{now}")
    count = 0
    while kept_file.exists():
        count += 1
        kept_file = path.with_name(f"{path.name}.corrupt-{now}.{count}")
    for suffix in ("-wal", "-shm", ""):
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.rename(kept_file.with_name(kept_file.name + suffix))
    sync_directory(path.parent)
    return kept_file


def _hash_secret(secret: str) -> str:
    """Return the SHA-256 of a join token's secret in hexadecimal; only this is stored."""
    return hashlib.sha256(secret.encode()).hexdigest()
