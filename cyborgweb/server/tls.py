"""The certificate of the agents' TLS listener: a configured one, or a self-signed one that is made once.

Agents pin its fingerprint. This module does not import Django.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from cyborgweb.settings.keys import Keys, keys, listen_address
from drivers.configuration import ConfigurationError

FILE = "agent-tls.pem"
"""Name of the file in the state directory with the self-made key and certificate. Only its owner can read it."""
VALID = timedelta(days=3653)


def context(settings: Keys) -> ssl.SSLContext:
    """Return the listener's TLS context (TLS 1.2 or later); make the certificate if there is none.

    Raises ConfigurationError with one sentence.
    """
    certificate, key = _files(settings)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        made.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"{certificate} and {key} cannot be used for TLS: {error}") from None
    return made


def fingerprint(settings: Keys) -> str:
    """Return the SHA-256 of the certificate in hex, as join tokens pin it; make the certificate if there is none.

    Raises ConfigurationError.
    """
    path, _ = _files(settings)
    try:
        first = x509.load_pem_x509_certificates(path.read_bytes())[0]
    except OSError as error:
        raise ConfigurationError(f"the certificate {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigurationError(f"{path} holds no certificate in PEM") from None
    return hashlib.sha256(first.public_bytes(Encoding.DER)).hexdigest()


def door(asked: str, unpinned: bool) -> tuple[str, str]:
    """Return the address and the pinned fingerprint of a join token. The fingerprint is '' if nothing is pinned.

    The address is `asked`; if that is empty, the TLS listener's, or else the web process's default address.
    If there is a TLS listener, an https address is assumed to be its address and is pinned, unless `unpinned`.
    Raises ConfigurationError.
    """
    settings = keys()
    where = asked or (address(settings) if settings.agent_listen else "http://127.0.0.1:8000")
    ours = where.startswith("https:") and settings.agent_listen and not unpinned
    return where, fingerprint(settings) if ours else ""


def address(settings: Keys) -> str:
    """Return the URL at which agents reach the TLS listener. Raises ConfigurationError if its port is 0."""
    host, port = listen_address(settings.agent_listen, "CYBORG_AGENT_LISTEN")
    if port == 0:
        raise ConfigurationError(
            f"CYBORG_AGENT_LISTEN={settings.agent_listen} names no port: set the port at which agents reach it"
        )
    name = socket.getfqdn() if host in ("0.0.0.0", "::") else host
    return f"https://[{name}]:{port}" if ":" in name else f"https://{name}:{port}"


def _files(settings: Keys) -> tuple[Path, Path]:
    """Return the paths of certificate and key: the configured ones (one file may hold both), or our self-made file.

    The self-made file is written if it does not exist. Raises ConfigurationError.
    """
    if settings.agent_cert:
        return Path(settings.agent_cert), Path(settings.agent_key or settings.agent_cert)
    if settings.agent_key:
        raise ConfigurationError("CYBORG_AGENT_KEY is set without CYBORG_AGENT_CERT: set both, or neither")
    path = settings.state / FILE
    if not path.exists():
        _store(path, _make())
    return path, path


def _make() -> bytes:
    """Make a key and a self-signed certificate; return both in PEM.

    Agents recognize the certificate by its fingerprint, so the names in it are only for people.
    """
    key, now, host = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC), socket.getfqdn()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"accelerators at {host}"[:64])])
    made = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return secret + made.public_bytes(Encoding.PEM)


def _store(path: Path, content: bytes) -> None:
    """Write the file completely or not at all; keep the existing one if another process has made it in the meantime.

    Raises ConfigurationError if it cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished.unlink(missing_ok=True)
        with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(unfinished, path)
        except FileExistsError:
            pass  # agents may already pin the other process's certificate
        finally:
            unfinished.unlink()
    except OSError as error:
        raise ConfigurationError(f"the certificate {path} cannot be written: {error.strerror}") from None
