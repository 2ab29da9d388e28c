"""Make one attempt to deliver a message to a webhook: signed as Standard Webhooks requires, to an address that was
checked.

This module does not use Django and runs on threads. Source: standardwebhooks.com, specification 1.0. A host name is
looked up once, every address it has must be allowed, and the connection goes to one of these addresses, so a DNS change
a moment later has no effect. Redirects are not followed. Only the status of an answer is read. ADR 1 (Libraries) says
why no HTTP library is used.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from cyborgweb.errors import CyborgwebError
from cyborgweb.notify.places import may_take_place
from drivers.errors import Failed
from drivers.isolation.threads import start_in_thread

CONNECT_TIMEOUT_S, ATTEMPT_TIMEOUT_S = 3.0, 10.0
MAX_ANSWER_SIZE = 1024
"""Bytes of an answer that are read at most to find its status."""
MAX_URL = 2000
SECRET_PREFIX = "whsec_"
NAT64 = IPv6Network("64:ff9b::/96")
STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?\r?\n")
HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?\.?")

IpAddress = IPv4Address | IPv6Address
LookupFunction = Callable[[str, int], Sequence[str]]
"""Function that returns the addresses of a host name and port. Raises OSError."""


class WebhookUrlError(CyborgwebError):
    """The URL cannot be used for a webhook. The text gives the reason and, where possible, what would be accepted."""


@dataclass(frozen=True)
class AllowedDestinations:
    """The destinations that the configuration allows for webhooks, in addition to public addresses over HTTPS.

    `allow_http` allows unencrypted HTTP; `networks` are the networks whose addresses are allowed.
    """

    allow_http: bool = False
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    def allows_address(self, address: IpAddress) -> bool:
        """Return whether connections to this address are allowed: it is public unicast, or in one of `networks`.

        An IPv4 address that a public IPv6 address contains (mapped, 6to4, Teredo, NAT64) must be allowed as well.
        """
        if any(address.version == network.version and address in network for network in self.networks):
            return True
        if isinstance(address, IPv6Address):
            embedded_addresses = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
            embedded_addresses += [IPv4Address(int(address) & 0xFFFFFFFF)] if address in NAT64 else []
            if address.ipv4_mapped:
                return self.allows_address(address.ipv4_mapped)
            if address.is_site_local or not all(self.allows_address(one) for one in embedded_addresses if one):
                return False
        return address.is_global and not address.is_multicast and not address.is_reserved


@dataclass(frozen=True)
class WebhookUrl:
    """The parsed parts of a webhook URL. `path` includes the query; `host` of an IPv6 address has no brackets."""

    is_https: bool
    host: str
    port: int
    path: str


@dataclass(frozen=True)
class AttemptOutcome:
    """Result of one attempt to deliver a message. `error` is '' on success; `is_gone` means that the receiver answered
    410 and wants no more messages, `is_permanent` that another attempt with this message is useless. `seconds` is how
    long the attempt to reach a webhook took.
    """

    error: str = ""
    is_gone: bool = False
    is_permanent: bool = False
    seconds: float = 0.0


class LookupPlaces:
    """Limits the names that are looked up at the same time: `total` in all, and `per_project` for each project, fewer
    while half of all are taken (`places.may_take_place`).

    A lookup cannot be cancelled, so it keeps its place until it ends, also after its attempt has timed out.
    """

    def __init__(self, total: int, per_project: int) -> None:
        self._total, self._per_project = total, per_project
        self._taken: Counter[str] = Counter()
        self._changed = threading.Condition()

    def take(self, project: str, timeout_s: float) -> bool:
        """Wait for a place for at most `timeout_s` seconds. Return whether the project got one."""

        def is_free() -> bool:
            """Return whether this project may begin a lookup."""
            return may_take_place(self._taken.total(), self._taken[project], self._total, self._per_project)

        with self._changed:
            if not self._changed.wait_for(is_free, timeout_s):
                return False
            self._taken[project] += 1
            return True

    def give_back(self, project: str) -> None:
        """Let another lookup begin."""
        with self._changed:
            self._taken[project] -= 1
            self._taken += Counter()  # drops projects without lookups
            self._changed.notify_all()


_lookup_places = LookupPlaces(64, 8)
"""As many as there are simultaneous attempts in all, and of one project, so that DNS servers that hang for the names of
one project delay no other project.
"""


def parse_networks(words: Sequence[str]) -> tuple[IPv4Network | IPv6Network, ...]:
    """Parse the networks in the configuration. Raises ValueError for a word that is no network."""
    return tuple(ip_network(word) for word in words)


def generate_secret() -> str:
    """Return a new random secret: `whsec_` and 32 random bytes in base64."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sign_message(secret: str, message: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header `webhook-signature` for this message id, time (UNIX seconds) and body. `secret` is
    in plain text.
    """
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    digest = hmac.new(key, f"{message}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def parse_webhook_url(url: str, allowed: AllowedDestinations) -> WebhookUrl:
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
    if parts.scheme == "http" and not allowed.allow_http:
        raise WebhookUrlError(
            "A webhook's URL begins with https://, because this installation sends nothing unencrypted."
        )
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise WebhookUrlError("A webhook's URL has no name, password or fragment: messages are signed instead.")
    if (literal_address := _parse_literal_address(host)) is not None:
        _check_addresses([literal_address], host, allowed)
    elif not HOST_NAME.fullmatch(host):
        raise WebhookUrlError("The host in this URL is no name that DNS can resolve.")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    secure = parts.scheme == "https"
    return WebhookUrl(secure, host, port or (443 if secure else 80), path)


def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host name, from the system's resolver; an address may occur twice. Raises OSError, or
    UnicodeError for a name that cannot be encoded.
    """
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def post_message(
    url: str,
    headers: dict[str, str],
    body: bytes,
    allowed: AllowedDestinations,
    lookup: LookupFunction = resolve_host,
    project: str = "",
) -> AttemptOutcome:
    """Make one attempt to post the message and return its outcome. Blocks for at most about `ATTEMPT_TIMEOUT_S` s, from
    the lookup of the name to the status of the answer.

    Errors of the URL, the network and TLS, and every answer but 2xx, are returned as a failed outcome and not raised.
    `lookup` resolves the host's name; the number of lookups of one `project` is limited.
    """
    end = time.monotonic() + ATTEMPT_TIMEOUT_S
    try:
        destination = parse_webhook_url(url, allowed)
        with _open_connection(destination, allowed, lookup, project, end) as connection:
            _send_request(connection, _build_request(destination, headers, body), end)
            status = _read_status(connection, end)
    except WebhookUrlError as refused:
        return AttemptOutcome(str(refused))
    except TimeoutError:
        return AttemptOutcome("The receiver did not answer in time.")
    except ssl.SSLCertVerificationError as error:
        return AttemptOutcome(f"The receiver's certificate is not accepted: {error.verify_message}.")
    except OSError as error:
        return AttemptOutcome(f"The receiver cannot be reached: {error.strerror or type(error).__name__}.")
    return _outcome_of_status(status)


def _outcome_of_status(status: int) -> AttemptOutcome:
    """Return success for 2xx, and a failed attempt for every other status. `is_gone` is True for 410."""
    if 200 <= status < 300:
        return AttemptOutcome()
    if 300 <= status < 400:
        return AttemptOutcome(
            f"The receiver answered {status}: redirects are not followed. Subscribe with the final address."
        )
    return AttemptOutcome(f"The receiver answered {status}.", is_gone=status == 410)


def _parse_literal_address(host: str) -> IpAddress | None:
    """Return the address if the host in a URL is an IP address, and None if it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _check_addresses(addresses: Sequence[IpAddress], host: str, allowed: AllowedDestinations) -> None:
    """Raise WebhookUrlError if there is no address, or if one of them is not allowed. `host` is for the
    message only.
    """
    if not addresses:
        raise WebhookUrlError(f"{host} has no address.")
    if not all(allowed.allows_address(address) for address in addresses):
        # The message does not name the address: it comes from our internal DNS, which the subscriber may not see.
        raise WebhookUrlError(f"{host} has an address that is not public: webhooks are not sent there.")


def _open_connection(
    destination: WebhookUrl, allowed: AllowedDestinations, lookup: LookupFunction, project: str, end: float
) -> socket.socket:
    """Resolve the host name, check all its addresses, and open a connection to one of them, with TLS if the URL asks
    for it. Each of these takes `CONNECT_TIMEOUT_S` seconds at most, and none goes on after `end` (monotonic clock).

    Raises WebhookUrlError if there is no address or one of them is not allowed, OSError if the name is not resolved, no
    connection is possible, or the certificate is not accepted.
    """
    try:
        address_texts = _look_up(lookup, destination.host, destination.port, project, _end_of_step(end))
    except TimeoutError:
        raise OSError(0, f"the name {destination.host} was not resolved in time") from None
    except (socket.gaierror, UnicodeError):
        raise OSError(0, f"the name {destination.host} cannot be resolved") from None
    addresses = [ip_address(text.partition("%")[0]) for text in dict.fromkeys(address_texts)]
    _check_addresses(addresses, destination.host, allowed)
    connection = _connect_to_first([str(address) for address in addresses], destination.port, _end_of_step(end))
    try:
        connection.settimeout(_remaining_seconds(_end_of_step(end)))
        return (
            _tls_context().wrap_socket(connection, server_hostname=destination.host)
            if destination.is_https
            else connection
        )
    except BaseException:
        connection.close()
        raise


def _look_up(lookup: LookupFunction, host: str, port: int, project: str, end: float) -> Sequence[str]:
    """Look up the name in a daemon thread, and return its addresses.

    A lookup cannot be cancelled: after the time-out its thread goes on, and does not delay the end of the process.
    Raises TimeoutError at `end` (monotonic clock), OSError if no thread can be started, and whatever `lookup` raises.
    """
    places = _lookup_places
    if not places.take(project, _remaining_seconds(end)):
        raise TimeoutError

    def run() -> Sequence[str]:
        """Look up the name, and let another lookup begin."""
        try:
            return lookup(host, port)
        finally:
            places.give_back(project)

    try:
        future = start_in_thread(run)
    except Failed as error:
        places.give_back(project)
        raise OSError(0, str(error)) from None
    return future.result(_remaining_seconds(end))


def _connect_to_first(addresses: Sequence[str], port: int, end: float) -> socket.socket:
    """Connect to the first address that answers, before `end` (monotonic clock).

    Raises OSError (also TimeoutError) if none of them answers.
    """
    for address in addresses[:-1]:
        try:
            return socket.create_connection((address, port), _remaining_seconds(end))
        except OSError:
            continue  # another address may be reachable, for example if this host has no IPv6
    return socket.create_connection((addresses[-1], port), _remaining_seconds(end))


@lru_cache(maxsize=1)
def _tls_context() -> ssl.SSLContext:
    """Return this process's TLS context, which checks certificates against the system's authorities and
    the host name.
    """
    return ssl.create_default_context()


def _build_request(destination: WebhookUrl, headers: dict[str, str], body: bytes) -> bytes:
    """Return the bytes of an HTTP/1.1 POST. It asks for the connection to be closed after the answer."""
    host_header = f"[{destination.host}]" if ":" in destination.host else destination.host
    port = "" if destination.port == (443 if destination.is_https else 80) else f":{destination.port}"
    lines = [
        f"POST {destination.path} HTTP/1.1",
        f"Host: {host_header}{port}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    lines += [f"{key}: {value}" for key, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


def _send_request(connection: socket.socket, request: bytes, end: float) -> None:
    """Send these bytes. Raises TimeoutError at `end` (monotonic clock), and OSError if the connection fails.

    `sendall` of a TLS connection would allow each record the whole time.
    """
    while request:
        connection.settimeout(_remaining_seconds(end))
        request = request[connection.send(request) :]


def _read_status(connection: socket.socket, end: float) -> int:
    """Read the answer up to its status line and return the status.

    Raises WebhookUrlError if the answer has no HTTP status line, TimeoutError at `end` (monotonic clock), and OSError
    if the connection fails.
    """
    answer = b""
    while len(answer) < MAX_ANSWER_SIZE:
        connection.settimeout(_remaining_seconds(end))
        more = connection.recv(MAX_ANSWER_SIZE - len(answer))
        answer += more
        if found := STATUS_LINE.match(answer):
            return int(found[1])
        if not more or b"\n" in answer:
            break
    raise WebhookUrlError(
        "The receiver's answer is no HTTP answer."
        if answer
        else "The receiver closed the connection without an answer."
    )


def _end_of_step(end: float) -> float:
    """Return when a step of connecting that begins now must have ended, at the latest at `end` (monotonic clock)."""
    return min(end, time.monotonic() + CONNECT_TIMEOUT_S)


def _remaining_seconds(end: float) -> float:
    """Return the seconds until `end` (monotonic clock). Raises TimeoutError if it has passed."""
    remaining = end - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
