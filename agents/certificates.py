"""Announcements of certificates: which certificate of the agents' listener replaces another one.

An agent pins the certificate that its join token names. To replace that certificate without new join tokens, an
operator signs an announcement with the announcement key, which is kept offline. Agents know its public half from their
join token, or from the conductor to which they were connected when it was set. The module is pure, and both sides
import it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from agents import credentials
from agents.errors import AgentsError
from agents.wire import FINGERPRINT_PATTERN, MAX_ANNOUNCEMENTS, CertificateAnnouncement


class AnnouncementError(AgentsError):
    """A text is no announcement, or its signature is not that of the announcement key."""


_line_decoder = msgspec.json.Decoder(CertificateAnnouncement)


def sign_announcement(
    key: Ed25519PrivateKey, number: int, replaces: str, fingerprint: str, both_until: int
) -> CertificateAnnouncement:
    """Sign an announcement with the announcement key. The values are not checked."""
    signature = credentials.sign_data(key, _build_signed_bytes(number, replaces, fingerprint, both_until))
    return CertificateAnnouncement(number, replaces, fingerprint, both_until, signature)


def is_signed_with(public_key: str, announcement: CertificateAnnouncement) -> bool:
    """Return whether the announcement has a valid signature of this announcement key; False also for a malformed
    key."""
    data = _build_signed_bytes(
        announcement.number, announcement.replaces, announcement.fingerprint, announcement.both_until
    )
    return credentials.is_valid_signature(public_key, announcement.signature, data)


def encode_announcement(announcement: CertificateAnnouncement) -> str:
    """Encode an announcement as a line of a file of announcements: JSON, without the end of the line."""
    return msgspec.json.encode(announcement).decode()


def parse_announcements(text: str, public_key: str) -> tuple[CertificateAnnouncement, ...]:
    """Parse a file of announcements: one in each line, with rising numbers, all signed with the announcement key.

    Empty lines are skipped. Raise AnnouncementError, which names the line, if that is not so.
    """
    announcements: list[CertificateAnnouncement] = []
    for line_number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            announcement = _line_decoder.decode(line)
        except msgspec.DecodeError as error:
            raise AnnouncementError(f"line {line_number} is no announcement: {error}") from None
        if not is_signed_with(public_key, announcement):
            raise AnnouncementError(f"line {line_number} is not signed with the announcement key {public_key}")
        if announcements and announcement.number <= announcements[-1].number:
            raise AnnouncementError(f"line {line_number} does not have a higher number than the line before it")
        announcements.append(announcement)
    if len(announcements) > MAX_ANNOUNCEMENTS:
        raise AnnouncementError(
            f"there are more than {MAX_ANNOUNCEMENTS} announcements: begin anew, with another key and new join tokens"
        )
    return tuple(announcements)


@dataclass(frozen=True)
class PinnedCertificates:
    """The certificates that an agent accepts: the first one that it pinned, and those that were announced since.

    `first` is '' if nothing is pinned; then there are no announcements. `announcement_key` is '' while the agent does
    not know it; then announcements have no effect.
    """

    first: str = ""
    announcement_key: str = ""
    announcements: tuple[CertificateAnnouncement, ...] = ()

    def add_announcements(self, announcements: Iterable[CertificateAnnouncement]) -> PinnedCertificates:
        """Return these pins with further announcements, the MAX_ANNOUNCEMENTS with the highest numbers.

        Announcements with another signature than that of the announcement key are left out. If two have the same
        number, the one that was known first stays.
        """
        by_number = {one.number: one for one in announcements if is_signed_with(self.announcement_key, one)}
        by_number |= {one.number: one for one in self.announcements}
        newest = sorted(by_number)[-MAX_ANNOUNCEMENTS:]
        return replace(self, announcements=tuple(by_number[number] for number in newest) if self.first else ())

    def list_accepted(self, now: float) -> frozenset[str]:
        """Return the fingerprints of the certificates that are accepted at the time `now` (seconds since 1970).

        An announcement counts if the certificate that it replaces was accepted at some time; a certificate that was
        replaced can come back with a later announcement.
        """
        accepted_until = {self.first: math.inf}
        for announcement in self.announcements:
            if announcement.replaces in accepted_until:
                accepted_until[announcement.replaces] = announcement.both_until
                accepted_until[announcement.fingerprint] = math.inf
        return frozenset(fingerprint for fingerprint, end in accepted_until.items() if now < end)

    def describe(self, now: float) -> str:
        """Return the accepted certificates as a text for the log."""
        return " and ".join(f"sha256:{fingerprint}" for fingerprint in sorted(self.list_accepted(now)))

    @property
    def newest(self) -> str:
        """The certificate to which the announcements lead from the first one; '' if none could be accepted."""
        if not (self.first and self.announcement_key):
            return ""
        accepted, newest = {self.first}, self.first
        for announcement in self.announcements:
            if announcement.replaces in accepted:
                accepted.add(newest := announcement.fingerprint)
        return newest


def compute_fingerprint(pem: bytes) -> str:
    """Return the fingerprint of the first certificate in a PEM file. Raise AnnouncementError if it has none."""
    try:
        first = x509.load_pem_x509_certificates(pem)[0]
    except ValueError:
        raise AnnouncementError("it holds no certificate in PEM") from None
    return hashlib.sha256(first.public_bytes(Encoding.DER)).hexdigest()


def normalize_fingerprint(text: str) -> str:
    """Return a fingerprint as 64 lower-case hexadecimal digits; colons and the prefix `sha256:` are removed.

    Raise AnnouncementError if it is not a SHA-256.
    """
    fingerprint = text.strip().lower().removeprefix("sha256:").replace(":", "")
    if not re.fullmatch(FINGERPRINT_PATTERN, fingerprint):
        raise AnnouncementError(f"{text!r} is not the SHA-256 fingerprint of a certificate (64 hexadecimal digits)")
    return fingerprint


def _build_signed_bytes(number: int, replaces: str, fingerprint: str, both_until: int) -> bytes:
    """Return the bytes of an announcement that are signed."""
    return msgspec.json.encode(["cyborg-agent-certificate-1", number, replaces, fingerprint, both_until])
