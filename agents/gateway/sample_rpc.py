"""Request samples from a gateway in another process: a POST to `PATH`, signed with Django's secret key.

`SampleEndpoint` is the server. It runs on the gateway's event loop, is mounted before Django, and never uses the
database. `fetch_samples` is the client; it blocks, so it must be called in a thread. The samples are passed on as JSON
text, without decoding.
"""

from __future__ import annotations

import hashlib
import http.client
from collections.abc import Collection, Iterator
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from django.core.signing import BadSignature
from msgspec import Meta, Struct

from accelerators.runtime.database_signing import DatabaseTimestampSigner
from agents import wire
from agents.errors import AgentsError
from agents.gateway.sample_cache import SampleCache, TooManyCensusesError

PATH = "/ws/gateway/load"
SIGNATURE_HEADER = "x-cyborg-signed"
MAX_SIGNATURE_AGE_S = 30
MAX_REQUEST_BYTES = 1024 * 1024
MAX_RESPONSE_BYTES = 512 * 1024 * 1024
HOSTS_PER_CHUNK = 256
"""Number of hosts whose samples are sent in one chunk; between chunks the event loop can do other work."""


class SampleRequest(Struct, frozen=True, omit_defaults=True):
    """A request for the samples of `hosts` (None: all).

    With neither `for_s` nor `within_s`, the answer holds the last samples. With `for_s`, the agents are also asked to
    send samples every `every_s` seconds for that long; the answer comes at once. With `within_s`, the agents are asked
    now, and the answer holds only newer samples; it comes when all agents have sent theirs, or after that many seconds.
    Agents are asked only if `hosts` names their hosts, not for None.
    """

    hosts: Annotated[tuple[int, ...], Meta(max_length=100_000)] | None = None
    every_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    for_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    within_s: Annotated[float, Meta(ge=0, le=60)] = 0.0


class HostSamples(Struct, frozen=True):
    """The last samples of one host as JSON, and the unix time when its gateway received them.

    They are decoded host by host (`decode_loads`): decoding all at once would block the other threads of the process.
    """

    host: int
    at: float
    said: msgspec.Raw

    def decode_loads(self) -> tuple[wire.DeviceLoad, ...]:
        """Decode and return the load of the host's devices; raise msgspec.DecodeError if they are no valid samples."""
        return _samples_decoder.decode(self.said).loads


class SampleResponse(Struct, frozen=True):
    """The samples that the gateway with this name has."""

    gateway: str
    hosts: list[HostSamples]


class GatewayUnreachableError(AgentsError):
    """Raised when a gateway cannot be reached or gives no usable answer; the text is the reason."""


_request_decoder = msgspec.json.Decoder(SampleRequest)
_response_decoder = msgspec.json.Decoder(SampleResponse)
_samples_decoder = msgspec.json.Decoder(wire.Samples)


class SampleEndpoint:
    """The ASGI application at `PATH`: it answers a SampleRequest from a `SampleCache`."""

    def __init__(self, sample_cache: SampleCache) -> None:
        self._sample_cache = sample_cache

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request: 200 with a SampleResponse, sent in chunks.

        Errors: 403 without a valid signature or for a method other than POST, 413 if the body is too long, 400 if the
        body is not a SampleRequest or not the signed one, 503 if too many censuses run.
        """
        digest = _read_signed_digest(scope)
        if scope["method"] != "POST" or digest is None:
            await _send_error(send, 403, "Only processes of this installation may send this request.")
            return
        body = await _read_body(receive)
        if body is None:
            await _send_error(send, 413, f"The request is longer than {MAX_REQUEST_BYTES} bytes.")
            return
        try:
            if _hash_body(body) != digest:
                raise ValueError("the signature does not match this body")
            request = _request_decoder.decode(body)
        except ValueError as error:
            await _send_error(send, 400, str(error))
            return
        try:
            since = await _ask_agents(self._sample_cache, request)
        except TooManyCensusesError as error:
            await _send_error(send, 503, str(error))
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        for chunk in _iterate_response(self._sample_cache, request.hosts, since):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"]}"})


async def _ask_agents(sample_cache: SampleCache, request: SampleRequest) -> float:
    """Ask agents for samples if the request says so; return since when samples are wanted (monotonic), 0.0 for any.

    Raise TooManyCensusesError if too many censuses run.
    """
    if request.within_s:
        return await sample_cache.run_census(request.hosts or (), request.within_s)
    if request.for_s:
        sample_cache.request_periodic_samples(request.hosts or (), request.every_s, request.for_s)
    return 0.0


def _iterate_response(sample_cache: SampleCache, hosts: Collection[int] | None, since: float) -> Iterator[bytes]:
    """Yield a SampleResponse as JSON in chunks of HOSTS_PER_CHUNK hosts, without the closing `]}`."""
    prefix = b'{"gateway":%s,"hosts":[' % msgspec.json.encode(sample_cache.name)
    chunk: list[bytes] = []
    for number, (host, at, samples_json) in enumerate(sample_cache.iterate_samples(hosts, since), 1):
        chunk.append(b'{"host":%d,"at":%.3f,"said":%b}' % (host, at, samples_json))
        if number % HOSTS_PER_CHUNK == 0:
            yield prefix + b",".join(chunk)
            prefix, chunk = b",", []
    yield prefix + b",".join(chunk) if chunk or prefix != b"," else b""


async def _read_body(receive: Any) -> bytes | None:
    """Receive the request's body; return None if it is longer than MAX_REQUEST_BYTES."""
    body, more = b"", True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event.get("more_body", False)
        if len(body) > MAX_REQUEST_BYTES:
            return None
    return body


async def _send_error(send: Any, status: int, sentence: str) -> None:
    """Send an HTTP error with the JSON body `{"error": sentence}`."""
    body = msgspec.json.encode({"error": sentence})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _make_signer() -> DatabaseTimestampSigner:
    """Return the signer of requests between gateways: Django's secret key, with a salt for this purpose."""
    return DatabaseTimestampSigner(salt="agents.gateway.sample_rpc")


def _hash_body(body: bytes) -> str:
    """Return the SHA-256 of the body in hexadecimal. This is the value that is signed."""
    return hashlib.sha256(body).hexdigest()


def _read_signed_digest(scope: Any) -> str | None:
    """Return the body's SHA-256 from the signed header; None if the header is missing, not signed by this installation,
    or older than MAX_SIGNATURE_AGE_S."""
    value = next((value for name, value in scope["headers"] if name == SIGNATURE_HEADER.encode()), b"")
    try:
        return _make_signer().unsign(value.decode("latin-1"), MAX_SIGNATURE_AGE_S)
    except BadSignature:
        return None


def fetch_samples(url: str, request: SampleRequest, timeout_s: float) -> SampleResponse:
    """Send a request to the gateway at `url` and return its answer.

    Raise TooManyCensusesError on a 503, GatewayUnreachableError if the gateway cannot be reached or answers anything
    else than a SampleResponse. It blocks. `timeout_s` limits each socket operation, not the whole call: the caller must
    limit that.
    """
    body = msgspec.json.encode(request)
    try:
        address = urlsplit(url)
        connection_class = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = connection_class(address.hostname or "", address.port, timeout=timeout_s)
    except (ValueError, http.client.HTTPException) as error:
        raise GatewayUnreachableError(f"{url[:200]!r} is not a valid address: {error}") from None
    try:
        connection.request("POST", PATH, body, {SIGNATURE_HEADER: _make_signer().sign(_hash_body(body))})
        response = connection.getresponse()
        payload = response.read(MAX_RESPONSE_BYTES)
        if response.status == 503:
            raise TooManyCensusesError(payload[:200].decode(errors="replace"))
        if response.status != 200:
            raise GatewayUnreachableError(f"{response.status} {payload[:200].decode(errors='replace')}")
        return _response_decoder.decode(payload)
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise GatewayUnreachableError(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()
