"""Request samples from a gateway in another process: a POST to `LOAD_PATH`, signed with Django's secret key.

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
from django.core.signing import BadSignature, TimestampSigner
from msgspec import Meta, Struct

from agents import wire
from agents.gateway.sample_cache import Board, TooManyCensusesError

PATH = "/ws/gateway/load"
HEADER = "x-cyborg-signed"
MAX_AGE_S = 30
MAX_ASK_BYTES = 1024 * 1024
MAX_ANSWER_BYTES = 512 * 1024 * 1024
HOSTS_A_PIECE = 256
"""Number of hosts whose samples are sent in one chunk; between chunks the event loop can do other work."""


class Ask(Struct, frozen=True, omit_defaults=True):
    """A request for the samples of `hosts` (None: all).

    Without times the answer holds the last samples. With `for_s`, the agents are also asked to send samples every
    `every_s` seconds for that long; the answer comes at once. With `within_s`, the agents are asked now, and the answer
    holds only newer samples; it comes when all agents have sent theirs, or after that many seconds.
    """

    hosts: Annotated[tuple[int, ...], Meta(max_length=100_000)] | None = None
    every_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    for_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    within_s: Annotated[float, Meta(ge=0, le=60)] = 0.0


class Held(Struct, frozen=True):
    """The last samples of one host as JSON, and the unix time when its gateway received them.

    They are decoded host by host (`decode_loads`): decoding all at once would block the other threads of the process.
    """

    host: int
    at: float
    said: msgspec.Raw

    def loads(self) -> tuple[wire.DeviceLoad, ...]:
        """Decode and return the load of the host's devices; raise DecodeError."""
        return _samples.decode(self.said).loads


class Answer(Struct, frozen=True):
    """The samples that the gateway with this name has."""

    gateway: str
    hosts: list[Held]


class GatewayUnreachableError(OSError):
    """Raised when a gateway did not answer a request; the text is the reason."""


_ask = msgspec.json.Decoder(Ask)
_answer = msgspec.json.Decoder(Answer)
_samples = msgspec.json.Decoder(wire.Samples)


class Door:
    """The ASGI application at `LOAD_PATH`: it answers a SampleRequest from a `SampleCache`."""

    def __init__(self, board: Board) -> None:
        self._board = board

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request.

        Errors: 403 without a valid signature, 413 for a body that is too long, 400 for one that is no SampleRequest or
        not the signed one, 503 if too many censuses run.
        """
        digest = _signed(scope)
        if scope["method"] != "POST" or digest is None:
            await _refuse(send, 403, "Only processes of this installation may send this request.")
            return
        body = await _body(receive)
        if body is None:
            await _refuse(send, 413, f"The request is longer than {MAX_ASK_BYTES} bytes.")
            return
        try:
            if _digest(body) != digest:
                raise ValueError("the signature does not match this body")
            asked = _ask.decode(body)
        except ValueError as error:
            await _refuse(send, 400, str(error))
            return
        try:
            since = await _do(self._board, asked)
        except TooManyCensusesError as error:
            await _refuse(send, 503, str(error))
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        for piece in _pieces(self._board, asked.hosts, since):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"]}"})


async def _do(board: Board, asked: Ask) -> float:
    """Ask agents for samples if the request says so; return since when samples are wanted (monotonic), 0.0 for any.

    Raise TooManyCensusesError if too many censuses run.
    """
    if asked.within_s:
        return await board.census(asked.hosts or (), asked.within_s)
    if asked.for_s:
        board.watch(asked.hosts or (), asked.every_s, asked.for_s)
    return 0.0


def _pieces(board: Board, hosts: Collection[int] | None, since: float) -> Iterator[bytes]:
    """Yield a SampleResponse as JSON in chunks of HOSTS_PER_CHUNK hosts, without the closing `]}`."""
    begin = b'{"gateway":%s,"hosts":[' % msgspec.json.encode(board.name)
    piece: list[bytes] = []
    for number, (host, at, said) in enumerate(board.said(hosts, since), 1):
        piece.append(b'{"host":%d,"at":%.3f,"said":%b}' % (host, at, said))
        if number % HOSTS_A_PIECE == 0:
            yield begin + b",".join(piece)
            begin, piece = b",", []
    yield begin + b",".join(piece) if piece or begin != b"," else b""


async def _body(receive: Any) -> bytes | None:
    """Receive the request's body; return None if it is longer than MAX_REQUEST_BYTES."""
    body, more = b"", True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event.get("more_body", False)
        if len(body) > MAX_ASK_BYTES:
            return None
    return body


async def _refuse(send: Any, status: int, sentence: str) -> None:
    """Send an error response with one JSON sentence."""
    body = msgspec.json.encode({"error": sentence})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _signer() -> TimestampSigner:
    return TimestampSigner(salt="agents.gateway.sample_rpc")


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _signed(scope: Any) -> str | None:
    """Return the body's digest from the signed header; None if it is missing, wrong or too old."""
    value = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
    try:
        return str(_signer().unsign(value.decode("latin-1"), max_age=MAX_AGE_S))
    except BadSignature:
        return None


def ask(url: str, asked: Ask, timeout_s: float) -> Answer:
    """Send a request to the gateway at `url` and return its answer. Raise GatewayUnreachableError, or
    TooManyCensusesError on a 503.

    It blocks. `timeout_s` limits each socket operation, not the whole call: the caller must limit that.
    """
    body = msgspec.json.encode(asked)
    try:
        address = urlsplit(url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=timeout_s)
    except (ValueError, http.client.HTTPException) as error:
        raise GatewayUnreachableError(f"{url[:200]!r} is not a valid address: {error}") from None
    try:
        connection.request("POST", PATH, body, {HEADER: _signer().sign(_digest(body))})
        response = connection.getresponse()
        said = response.read(MAX_ANSWER_BYTES)
        if response.status == 503:
            raise TooManyCensusesError(said[:200].decode(errors="replace"))
        if response.status != 200:
            raise GatewayUnreachableError(f"{response.status} {said[:200].decode(errors='replace')}")
        return _answer.decode(said)
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise GatewayUnreachableError(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()
