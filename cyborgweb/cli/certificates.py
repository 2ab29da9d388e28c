"""Commands that sign announcements of new certificates for agents. They need no server and no network."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from agents import certificates, credentials, wire
from cyborgweb.cli import options
from cyborgweb.cli.options import verb_command
from drivers.files import write_private

DAY_S = 24 * 3600
key_option = click.option(
    "--key",
    "key_file",
    required=True,
    type=click.Path(path_type=Path),
    help="File with the announcement key, as `cyborg announcement-key` makes it.",
)


@verb_command("announcement-key", "announcement-key /media/offline/announcement.key")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--encrypt", is_flag=True, help="Ask for a passphrase, and encrypt a new key with it.")
@options.dry_run_option
def announcement_key(file: Path, encrypt: bool, dry_run: bool) -> None:
    """Make the key that signs announcements of certificates, and print its public half.

    If FILE exists, the public half of the key in it is printed. Keep FILE offline. Set the printed line as
    CYBORG_AGENT_ANNOUNCEMENT_KEY on the conductor.
    """
    if file.exists():
        key = _load_key(file)
    elif dry_run:
        click.echo(f"A new key would be stored in {file}.")
        return
    else:
        key = Ed25519PrivateKey.generate()
        encryption: KeySerializationEncryption = NoEncryption()
        if encrypt:
            passphrase = click.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
            encryption = BestAvailableEncryption(passphrase.encode())
        _write(file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        click.echo(f"Made {file}. Keep it offline: whoever has it can name the conductor's certificates.", err=True)
    click.echo(credentials.encode_public_key(key.public_key()))


@verb_command(
    "announce-certificate",
    "announce-certificate --key announcement.key --replaces old.pem --certificate new.pem --to agent-announcements",
)
@key_option
@click.option("--replaces", required=True, help="The present certificate: a PEM file or a SHA-256 fingerprint.")
@click.option("--certificate", required=True, help="The new certificate: a PEM file or a SHA-256 fingerprint.")
@click.option(
    "--both-days",
    default=30,
    show_default=True,
    type=click.IntRange(0, 3660),
    help="Days from now on in which agents accept both certificates.",
)
@click.option(
    "--to", required=True, type=click.Path(path_type=Path), help="File of announcements, to which a line is added."
)
@options.dry_run_option
def announce_certificate(
    key_file: Path, replaces: str, certificate: str, both_days: int, to: Path, dry_run: bool
) -> None:
    """Sign an announcement: agents that accept one certificate will also accept the other one.

    The file must have all former announcements: hosts that were away need them. Copy it to every conductor.
    """
    key, former = _load_key(key_file), _read_announcements(key_file, to)
    old, new = _read_fingerprint(replaces), _read_fingerprint(certificate)
    if old == new:
        raise click.ClickException("--replaces and --certificate are the same certificate")
    if former and former[-1].fingerprint != old:
        raise click.ClickException(
            f"the newest announcement in {to} names the certificate {former[-1].fingerprint}, so --replaces must be it"
        )
    number = former[-1].number + 1 if former else 1
    announcement = certificates.sign_announcement(key, number, old, new, int(time.time()) + both_days * DAY_S)
    lines = [certificates.encode_announcement(one) for one in (*former, announcement)]
    if dry_run:
        click.echo(f"This line would be added to {to}: {lines[-1]}")
        return
    _write(to, "".join(f"{line}\n" for line in lines).encode())
    end = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(announcement.both_until))
    click.echo(f"Announcement {number} is in {to}. Until {end} agents accept both certificates.", err=True)
    click.echo(lines[-1])


def _load_key(file: Path) -> Ed25519PrivateKey:
    """Load the announcement key; ask for its passphrase if it is encrypted. Raise ClickException if that fails."""
    try:
        content = file.read_bytes()
        try:
            key = load_pem_private_key(content, None)
        except TypeError:  # it is encrypted
            key = load_pem_private_key(content, click.prompt("Passphrase", hide_input=True, err=True).encode())
    except OSError as error:
        raise click.ClickException(f"{file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise click.ClickException(f"{file} is no announcement key, or the passphrase is wrong") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise click.ClickException(f"{file} is no announcement key: it holds a key of another kind")
    return key


def _read_announcements(key_file: Path, file: Path) -> tuple[wire.CertificateAnnouncement, ...]:
    """Return the announcements in a file, none if there is no file. Raise ClickException if it cannot be used."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{file} cannot be read: {error}") from None
    try:
        return certificates.parse_announcements(text, credentials.encode_public_key(_load_key(key_file).public_key()))
    except certificates.AnnouncementError as error:
        raise click.ClickException(f"{file}: {error}") from None


def _read_fingerprint(text: str) -> str:
    """Return the fingerprint of a certificate in a PEM file, or the fingerprint itself. Raise ClickException."""
    try:
        if os.path.exists(text):
            return certificates.compute_fingerprint(Path(text).read_bytes())
        return certificates.normalize_fingerprint(text)
    except OSError as error:
        raise click.ClickException(f"{text} cannot be read: {error.strerror}") from None
    except certificates.AnnouncementError as error:
        raise click.ClickException(f"{text}: {error}") from None


def _write(file: Path, content: bytes) -> None:
    """Replace the file, which only its owner can read then. Raise ClickException if that fails."""
    try:
        write_private(file, content)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}") from None
