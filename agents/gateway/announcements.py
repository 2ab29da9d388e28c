"""The file of announcements of certificates, which a gateway reads again whenever it changes."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from agents import certificates, wire
from agents.errors import AgentsError

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 2.0
"""Minimum seconds between two checks whether the file has changed."""
MAX_FILE_BYTES = 64 * 1024
"""Maximum size of the file: 32 announcements have some 10 kB."""


class AnnouncementFile:
    """Reads the file of announcements. Without an announcement key there are none."""

    def __init__(self, public_key: str, path: Path) -> None:
        self.public_key, self._path = public_key, path
        self._message: wire.Certificates | None = None
        self._version: tuple[int, ...] = ()
        self._next_check_at = 0.0
        self.own_fingerprint = ""
        """The certificate of this process's listener; '' if it has none."""

    def read(self) -> wire.Certificates | None:
        """Return the message with all announcements, the same object until the file has changed. None without a key.

        If the file becomes unreadable, the announcements that were read last stay, and an error is logged once.
        """
        if self.public_key and (now := time.monotonic()) >= self._next_check_at:
            self._next_check_at = now + CHECK_INTERVAL_S
            if (version := self._read_version()) != self._version or self._message is None:
                self._version = version
                self._load()
        return self._message

    def _read_version(self) -> tuple[int, ...]:
        """Return what changes when the file does; empty if it cannot be read."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _load(self) -> None:
        """Read the file. If it cannot be used, log that; then the former announcements stay."""
        from accelerators.runtime import database_clock  # not at the top: the supervisor does without Django

        try:
            announcements = read_announcements(self.public_key, self._path)
            own = certificates.PinnedCertificates(self.own_fingerprint, self.public_key, announcements)
            if self.own_fingerprint not in own.list_accepted(database_clock.estimate_timestamp()):
                raise certificates.AnnouncementError(
                    f"by {self._path} agents would refuse the present certificate, because its time is over:"
                    " install the announced one first, or sign an announcement with a later end (was the clock right"
                    " where this one was signed?)"
                )
            self._message = wire.Certificates(self.public_key, announcements)
        except AgentsError as error:
            log.error("announcements of certificates cannot be used: %s", error)
            self._message = self._message or wire.Certificates(self.public_key)


def read_announcements(public_key: str, path: Path) -> tuple[wire.CertificateAnnouncement, ...]:
    """Return the announcements in the file; none if there is no file. Raise AnnouncementError if it cannot be used."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise certificates.AnnouncementError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        return certificates.parse_announcements(content.decode(), public_key)
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise certificates.AnnouncementError(f"{path} cannot be read: {error}") from None
    except certificates.AnnouncementError as error:
        raise certificates.AnnouncementError(f"{path}: {error}") from None
