"""The certificate of the agents' TLS listener: a configured one, or a self-signed one that is made once.

Agents pin its fingerprint. This module does not import Django.
"""

from __future__ import annotations

import os
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from agents import certificates
from cyborgweb.settings.keys import Keys, get_keys, parse_listen_address
from drivers.configuration import ConfigurationError

CERTIFICATE_FILE = "agent-tls.pem"
"""Name of the file in the state directory with the self-made key and certificate. Only its owner can read it."""
VALIDITY = timedelta(days=3653)


def make_ssl_context(settings: Keys) -> ssl.SSLContext:
    """Return the TLS context of the agents' listener (TLS 1.2 or later). If there is no certificate yet, make one.

    Raises ConfigurationError if the certificate or its key cannot be written, read or used.
    """
    certificate, key = _get_certificate_files(settings)
    ssl_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ssl_context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        ssl_context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"{certificate} and {key} cannot be used for TLS: {error}") from None
    return ssl_context


def read_fingerprint(settings: Keys) -> str:
    """Return the SHA-256 of the certificate of the agents' TLS listener, in hex, as join tokens pin it.

    If the file has several certificates, the first is meant. If none is configured or made yet, one is made. Raises
    ConfigurationError if the file cannot be written or read, or holds no certificate.
    """
    path, _ = _get_certificate_files(settings)
    try:
        return certificates.compute_fingerprint(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"the certificate {path} cannot be read: {error.strerror}") from None
    except certificates.AnnouncementError:
        raise ConfigurationError(f"{path} holds no certificate in PEM") from None


def write_new_certificate(path: Path) -> str:
    """Make a key and a self-signed certificate, write both to a new file with mode 0600; return the fingerprint.

    Raises ConfigurationError if the file exists or cannot be written.
    """
    content = _make_certificate()
    try:
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigurationError(f"the certificate {path} cannot be written: {error.strerror}") from None
    return certificates.compute_fingerprint(content)


def choose_agent_address(requested: str, unpinned: bool) -> tuple[str, str]:
    """Return the address and the pinned fingerprint of a join token. The fingerprint is '' if nothing is pinned.

    The address is `requested`; if that is empty, the TLS listener's, or else the one of `CYBORG_LISTEN`. If there is a
    TLS listener, an https address is assumed to be its address and is pinned, unless `unpinned`. Raises
    ConfigurationError if the listener's address or certificate cannot be used.
    """
    settings = get_keys()
    url = requested or get_listener_url(settings)
    is_pinned = url.startswith("https:") and settings.agent_listen and not unpinned
    return url, read_fingerprint(settings) if is_pinned else ""


def get_listener_url(settings: Keys) -> str:
    """Return the URL at which agents reach the TLS listener, or the web process if there is no such listener.

    If it listens on all addresses, the URL has this machine's name; it may be a loopback address. Raises
    ConfigurationError if the value is not ADDRESS:PORT, or the port is 0.
    """
    key, value = "CYBORG_AGENT_LISTEN", settings.agent_listen
    if not value:
        key, value = "CYBORG_LISTEN", settings.listen
    host, port = parse_listen_address(value, key)
    if port == 0:
        raise ConfigurationError(f"{key}={value} names no port: set the port at which agents reach it")
    name = socket.getfqdn() if host in ("0.0.0.0", "::") else host
    return f"{'https' if settings.agent_listen else 'http'}://{f'[{name}]' if ':' in name else name}:{port}"


def _get_certificate_files(settings: Keys) -> tuple[Path, Path]:
    """Return the paths of certificate and key: the configured ones (one file may hold both), or our self-made file.

    The self-made file is written if it does not exist; configured files are not looked at. Raises ConfigurationError if
    the file cannot be written, or if only the key is configured.
    """
    if settings.agent_cert:
        return Path(settings.agent_cert), Path(settings.agent_key or settings.agent_cert)
    if settings.agent_key:
        raise ConfigurationError("CYBORG_AGENT_KEY is set without CYBORG_AGENT_CERT: set both, or neither")
    path = settings.state_path / CERTIFICATE_FILE
    if not path.exists():
        _store_certificate(path, _make_certificate())
    return path, path


def _make_certificate() -> bytes:
    """Make a key and a self-signed certificate; return both in PEM.

    Agents recognize the certificate by its fingerprint, so the names in it are only for people.
    """
    key, now, host = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC), socket.getfqdn()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"accelerators at {host}"[:64])])
    certificate = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private_key = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private_key + certificate.public_bytes(Encoding.PEM)


def _store_certificate(path: Path, content: bytes) -> None:
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
