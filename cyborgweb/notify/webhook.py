"""Make one attempt to deliver a message to a webhook: signed as Standard Webhooks requires, to an address that was
checked.

This module does not use Django and runs on threads. Source: standardwebhooks.com, specification 1.0. A host name is
looked up once, every address it has must be allowed, and the connection goes to one of these addresses, so a DNS change
a moment later has no effect. Redirects are not followed. Only the status of an answer is read.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

CONNECT_S, WHOLE_S = 3.0, 10.0
MOST_ANSWER = 1024
"""Bytes of an answer that are read at most to find its status."""
MAX_URL = 2000
PREFIX = "whsec_"
NAT64 = IPv6Network("64:ff9b::/96")
STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?\r?\n")
HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?\.?")

Address = IPv4Address | IPv6Address
Lookup = Callable[[str, int], Sequence[str]]
"""Function that returns the addresses of a host name and port. Raises OSError."""
_lookups = ThreadPoolExecutor(64, thread_name_prefix="webhook-names")
"""One thread per simultaneous attempt, so that a DNS server that hangs for one name delays no other."""


class WebhookUrlError(ValueError):
    """The URL cannot be used for a webhook. The text gives the reason and, where possible, what would be accepted."""


@dataclass(frozen=True)
class Allowed:
    """What the configuration allows for webhooks, in addition to public addresses over HTTPS."""

    http: bool = False
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    def takes(self, address: Address) -> bool:
        """Return whether a connection to this address is allowed: it is public unicast, or in one of the listed
        networks. An IPv4 address inside an IPv6 address must be allowed as well.
        """
        if any(address.version == network.version and address in network for network in self.networks):
            return True
        if isinstance(address, IPv6Address):
            inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
            inner += [IPv4Address(int(address) & 0xFFFFFFFF)] if address in NAT64 else []
            if address.ipv4_mapped:
                return self.takes(address.ipv4_mapped)
            if address.is_site_local or not all(self.takes(one) for one in inner if one):
                return False
        return address.is_global and not address.is_multicast and not address.is_reserved


@dataclass(frozen=True)
class Where:
    """The parsed parts of a webhook URL."""

    secure: bool
    host: str
    port: int
    path: str


@dataclass(frozen=True)
class Outcome:
    """Result of one attempt. `error` is '' on success; `gone` means that the receiver answered 410 and wants no more
    messages.
    """

    error: str = ""
    gone: bool = False


def networks(words: Sequence[str]) -> tuple[IPv4Network | IPv6Network, ...]:
    """Parse the networks in the configuration. Raises ValueError for a word that is no network."""
    return tuple(ip_network(word) for word in words)


def new_secret() -> str:
    """Return a new random secret: `whsec_` and 32 random bytes in base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def signature(secret: str, message: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header `webhook-signature` for this message id, time and body."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = hmac.new(key, f"{message}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signed).decode()}"


def where(url: str, allowed: Allowed) -> Where:
    """Parse a webhook URL and check everything that needs no DNS lookup. Raises WebhookUrlError with the reason if it
    cannot be used.
    """
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or set(url) & set(' \\"<>'):
        raise WebhookUrlError(
            f"A webhook's URL has at most {MAX_URL} characters, all of them ASCII and without blanks."
        )
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        raise WebhookUrlError("This is no URL: write https://HOST/PATH.") from None
    if parts.scheme not in ("https", "http") or not host:
        raise WebhookUrlError("A webhook's URL begins with https:// and the name of a host.")
    if parts.scheme == "http" and not allowed.http:
        raise WebhookUrlError(
            "A webhook's URL begins with https://, because this installation sends nothing unencrypted."
        )
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise WebhookUrlError("A webhook's URL has no name, password or fragment: messages are signed instead.")
    if (literal := _literal(host)) is not None:
        _check([literal], host, allowed)
    elif not HOST.fullmatch(host):
        raise WebhookUrlError("The host in this URL is no name that DNS can resolve.")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    secure = parts.scheme == "https"
    return Where(secure, host, port or (443 if secure else 80), path)


def look_up(host: str, port: int) -> Sequence[str]:
    """Resolve a host name with the system's resolver. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def post(url: str, headers: dict[str, str], body: bytes, allowed: Allowed, lookup: Lookup = look_up) -> Outcome:
    """Make one attempt to post the message and return its outcome. Ends within about `WHOLE_S`; errors of the URL, the
    network and TLS are returned, not raised.
    """
    end = time.monotonic() + WHOLE_S
    try:
        to = where(url, allowed)
        with _connected(to, allowed, lookup) as connection:
            connection.settimeout(_left(end))
            connection.sendall(_request(to, headers, body))
            status = _status(connection, end)
    except WebhookUrlError as refused:
        return Outcome(str(refused))
    except TimeoutError:
        return Outcome("The receiver did not answer in time.")
    except ssl.SSLCertVerificationError as error:
        return Outcome(f"The receiver's certificate is not accepted: {error.verify_message}.")
    except OSError as error:
        return Outcome(f"The receiver cannot be reached: {error.strerror or type(error).__name__}.")
    return _judged(status)


def _judged(status: int) -> Outcome:
    if 200 <= status < 300:
        return Outcome()
    if 300 <= status < 400:
        return Outcome(f"The receiver answered {status}: redirects are not followed. Subscribe with the final address.")
    return Outcome(f"The receiver answered {status}.", gone=status == 410)


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _check(addresses: Sequence[Address], host: str, allowed: Allowed) -> None:
    if not addresses:
        raise WebhookUrlError(f"{host} has no address.")
    if not all(allowed.takes(address) for address in addresses):
        # The message does not name the address: it comes from our internal DNS, which the subscriber may not see.
        raise WebhookUrlError(f"{host} has an address that is not public: webhooks are not sent there.")


def _connected(to: Where, allowed: Allowed, lookup: Lookup) -> socket.socket:
    """Open a connection, with TLS if the URL asks for it, to one of the name's current addresses, after checking all of
    them. Raises WebhookUrlError if one is not allowed, OSError if the connection fails.
    """
    try:
        found = _lookups.submit(lookup, to.host, to.port).result(CONNECT_S)
    except TimeoutError:
        raise OSError(0, f"the name {to.host} was not resolved in time") from None
    except (socket.gaierror, UnicodeError):
        raise OSError(0, f"the name {to.host} cannot be resolved") from None
    addresses = [ip_address(text.partition("%")[0]) for text in dict.fromkeys(found)]
    _check(addresses, to.host, allowed)
    connection = _first([str(address) for address in addresses], to.port)
    try:
        return _tls().wrap_socket(connection, server_hostname=to.host) if to.secure else connection
    except BaseException:
        connection.close()
        raise


def _first(addresses: Sequence[str], port: int) -> socket.socket:
    """Connect to the first address that answers, within `CONNECT_S` for all. Raises the last failure if none does."""
    end = time.monotonic() + CONNECT_S
    for address in addresses[:-1]:
        try:
            return socket.create_connection((address, port), _left(end))
        except OSError:
            continue  # another address may be reachable, for example if this host has no IPv6
    return socket.create_connection((addresses[-1], port), _left(end))


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _request(to: Where, headers: dict[str, str], body: bytes) -> bytes:
    name = f"[{to.host}]" if ":" in to.host else to.host
    port = "" if to.port == (443 if to.secure else 80) else f":{to.port}"
    lines = [f"POST {to.path} HTTP/1.1", f"Host: {name}{port}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{key}: {value}" for key, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


def _status(connection: socket.socket, end: float) -> int:
    """Read the answer up to its status line and return the status. Raises WebhookUrlError if there is no HTTP status,
    TimeoutError at `end`.
    """
    answer = b""
    while len(answer) < MOST_ANSWER:
        connection.settimeout(_left(end))
        more = connection.recv(MOST_ANSWER - len(answer))
        answer += more
        if found := STATUS.match(answer):
            return int(found[1])
        if not more or b"\n" in answer:
            break
    raise WebhookUrlError(
        "The receiver's answer is no HTTP answer."
        if answer
        else "The receiver closed the connection without an answer."
    )


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
