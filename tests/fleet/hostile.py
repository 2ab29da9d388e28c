"""A hostile agent and a hostile tenant in one process: all that an enrolled host or a valid token can do, at once.

`neighbours.Neighbours` starts the process. Each attack has a number of workers and a highest rate of turns a second, so
that the generator is bounded. In a control run each attack gets the rate that it had against the product.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from agents import credentials, wire
from drivers.inventory import DriverReport
from tests.bench import messages
from tests.bench.api_clients import BIND, LENGTH, REQUESTS
from tests.bench.peer import UPGRADE, Key, create_key
from tests.bench.remote_calls import serve_calls

AGENT_ADDRESS, TENANT_ADDRESS = "127.0.0.2", "127.0.0.3"
"""The addresses from which the hostile agents and the hostile tenant connect."""
REPORTING_HOST, OVERSIZED_HOST = "hostile-0", "hostile-1"
HOSTILE_HOSTS = (REPORTING_HOST, OVERSIZED_HOST)
FIRST_KEY = 900_000
"""Number of the key of the first hostile host; the next host has the next one."""
UNKNOWN_KEY = 999_999
"""Number of a key that nobody has enrolled, with which handshakes are forged."""
VARIANTS, NEW_DEVICES = 4, 1300
"""The number of different reports, and of devices in each, none of which is in another: the product stores fewer."""
OVERSIZED_BYTES = 1_200_000
PATIENCE_S = 40.0
"""How long a client waits for an answer to a request that it left incomplete."""
SLOW_READ_S = 20.0
"""How long a slow reader reads one answer."""
TRICKLE_S, TRICKLE_BYTES = 0.5, 64
MAX_FORGED_NAMES = 50
LISTS = ("/v2/devices", "/v2/deployables", "/v2/accelerator_requests", "/api/accelerators/")
CRAFTED_ADDRESSES = (
    "=?utf-8?q?=0a?=@example.org",
    '"a\x0bb"@example.org',
    "a@b@example.org",
    "a\r\nBcc: x@example.org",
)


class AnsweredError(Exception):
    """Raised with the status of an answer that ends a turn early."""


@dataclass(frozen=True)
class Attack:
    """One kind of attack: `turn` is repeated by `workers` workers, together at most `per_s` times a second."""

    turn: Callable[[HostileNeighbours, int], Awaitable[str]]
    workers: int
    per_s: float


@dataclass
class HostileTarget:
    """Where the attacks go, with the tenant's credentials, and what the tenant knows about others."""

    port: int
    tokens: dict[str, str]
    nova: dict[str, str]
    """The headers of the tenant's requests that come through Nova."""
    offers: list[tuple[str, str]]
    foreign_request: str
    webhook: str
    victims: list[str]


class Pace:
    """Lets turns begin at most `per_s` times a second; what was missed is caught up for one second at most."""

    def __init__(self, per_s: float) -> None:
        self._pause_s, self._next_at = 1 / max(per_s, 1e-6), time.monotonic()

    async def wait(self) -> None:
        """Return when the next turn may begin."""
        self._next_at = max(self._next_at, time.monotonic() - 1.0)
        wait_s, self._next_at = self._next_at - time.monotonic(), self._next_at + self._pause_s
        await asyncio.sleep(max(0.0, wait_s))


class HostileSocket(asyncio.Protocol):
    """An agent's WebSocket. `opened` gives the status of the upgrade, `closed` is set at the end.

    `is_writable` is not set while the peer reads too slowly.
    """

    def __init__(self, request: bytes) -> None:
        self._request, self._unread = request, b""
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[int] = loop.create_future()
        self.is_writable, self.closed = asyncio.Event(), asyncio.Event()
        self.is_writable.set()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.opened.done():
            self._unread += data
            if b"\r\n" in self._unread:
                self.opened.set_result(int(self._unread[9:12]))

    def pause_writing(self) -> None:
        self.is_writable.clear()

    def resume_writing(self) -> None:
        self.is_writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_result(0)
        self.closed.set()
        self.is_writable.set()

    def send(self, text: bytes) -> None:
        """Send one masked text frame."""
        assert self.transport
        size = len(text)
        short = size < 65536
        head = b"\x81\xfe" + size.to_bytes(2, "big") if short else b"\x81\xff" + size.to_bytes(8, "big")
        self.transport.write(head + b"\0\0\0\0" + text)


class HostileNeighbours:
    """The commands of the process, and the attacks' turns. A turn returns its outcome as a label."""

    def __init__(self) -> None:
        self.target = HostileTarget(0, {}, {}, [], "", "", [])
        self.turns: Counter[str] = Counter()
        """The turns of each attack that have begun; its outcomes are of those that have ended."""
        self.outcomes: dict[str, Counter[str]] = {}
        self.sent_bytes = 0
        self._chance = random.Random(0)
        self._tasks: list[asyncio.Task[None]] = []
        self._began = self._ended = time.monotonic()
        self._keys = {host: create_key(FIRST_KEY + n) for n, host in enumerate(HOSTILE_HOSTS)}
        self._unknown_key = create_key(UNKNOWN_KEY)
        self._reports: list[tuple[str, str, str]] = []
        self._seq = int(time.time())
        self._socket: HostileSocket | None = None
        self._clients: dict[tuple[str, int], tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._subscription = ""

    async def start(self, target: dict[str, Any], seed: int, rates: dict[str, float] | None = None) -> dict[str, Any]:
        """Begin all attacks on `target` (the fields of HostileTarget), with the rates of ATTACKS or with `rates`."""
        self.target, self._chance = HostileTarget(**target), random.Random(seed)
        self.outcomes, self.turns = {name: Counter() for name in ATTACKS}, Counter()
        self.sent_bytes, self._subscription = 0, ""
        self._reports = self._reports or [make_report_parts(n, self.target.victims[0]) for n in range(VARIANTS)]
        self._began = time.monotonic()
        for name, attack in ATTACKS.items():
            per_s = attack.per_s if rates is None else rates.get(name, 0.0)
            if per_s:
                pace = Pace(per_s)
                self._tasks += [
                    asyncio.create_task(self._repeat(name, attack, worker, pace)) for worker in range(attack.workers)
                ]
        return {}

    async def stop(self) -> dict[str, Any]:
        """End all attacks, and return their totals."""
        self._ended = time.monotonic()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for _, writer in self._clients.values():
            writer.transport.abort()
        self._clients.clear()
        if self._socket and self._socket.transport:
            self._socket.transport.abort()
        self._socket = None
        return await self.get_totals()

    async def get_totals(self) -> dict[str, Any]:
        """Return the outcomes of each attack, the rate at which its turns began, and the bytes that were sent."""
        seconds = max((time.monotonic() if self._tasks else self._ended) - self._began, 1e-6)
        rates = {name: self.turns[name] / seconds for name in self.outcomes}
        return {"outcomes": self.outcomes, "rates": rates, "megabytes": self.sent_bytes / 1e6}

    async def _repeat(self, name: str, attack: Attack, worker: int, pace: Pace) -> None:
        """Take turns until it is cancelled; a broken connection is an outcome, too."""
        while True:
            await pace.wait()
            self.turns[name] += 1
            try:
                outcome = await attack.turn(self, worker)
            except AnsweredError as error:
                outcome = str(error)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                outcome = type(error).__name__
                if pair := self._clients.pop((name, worker), None):
                    pair[1].transport.abort()
            self.outcomes[name][outcome] += 1

    # The hostile agent.

    async def send_report(self, worker: int) -> str:
        """Send the next report with devices that no report had before, as soon as the gateway reads."""
        if self._socket is None or self._socket.closed.is_set():
            status, self._socket = await self._open_agent(REPORTING_HOST, self._keys[REPORTING_HOST])
            if status != 101:
                return str(status)
        self._seq += 1
        head, middle, tail = self._reports[self._seq % VARIANTS]
        text = f"{head}{self._seq}{middle}{self._seq:040x}{tail}".encode()
        self.sent_bytes += len(text)
        self._socket.send(text)
        await self._socket.is_writable.wait()
        return "sent"

    async def send_oversized(self, worker: int) -> str:
        """Connect, send a frame that is larger than the gateway accepts, and wait for its end."""
        status, peer = await self._open_agent(OVERSIZED_HOST, self._keys[OVERSIZED_HOST])
        if status != 101 or peer is None:
            return str(status)
        assert peer.transport
        try:
            self.sent_bytes += OVERSIZED_BYTES
            peer.send(b" " * OVERSIZED_BYTES)
            async with asyncio.timeout(5.0):
                await peer.closed.wait()
            return "closed"
        finally:
            peer.transport.abort()

    async def forge_handshake(self, worker: int) -> str:
        """Try to connect under another host's name with a key that nobody has enrolled."""
        victim = self._chance.choice(self.target.victims[:MAX_FORGED_NAMES])
        status, peer = await self._open_agent(victim, self._unknown_key)
        if peer and peer.transport:
            peer.transport.abort()
        return str(status)

    async def _open_agent(self, host: str, key: Key) -> tuple[int, HostileSocket | None]:
        """Fetch a challenge and send the upgrade; return its status, and the socket if it is open."""
        status, body = await self._fetch_challenge()
        if status != 200:
            return status, None
        signed = credentials.build_connect_bytes(host, host, 1, json.loads(body)["nonce"], "")
        credential = credentials.Credential(
            host, host, 1, json.loads(body)["nonce"], key.public, credentials.sign_data(key.private, signed)
        )
        request = UPGRADE.format(
            path=wire.AGENT_PATH,
            version=wire.VERSIONS[0],
            authorization=credentials.encode_authorization(credential),
        )
        loop = asyncio.get_running_loop()
        _, peer = await loop.create_connection(
            lambda: HostileSocket(request.encode()), "127.0.0.1", self.target.port, local_addr=(AGENT_ADDRESS, 0)
        )
        async with asyncio.timeout(PATIENCE_S):
            status = await peer.opened
        if status == 101:
            return status, peer
        assert peer.transport
        peer.transport.abort()
        return status, None

    async def _fetch_challenge(self) -> tuple[int, bytes]:
        reader, writer = await self._open(AGENT_ADDRESS)
        try:
            writer.write(f"GET {wire.CHALLENGE_PATH} HTTP/1.1\r\nHost: hostile\r\nConnection: close\r\n\r\n".encode())
            return await _read_answer(reader)
        finally:
            writer.transport.abort()

    # The hostile tenant.

    async def hold_body_back(self, worker: int) -> str:
        """Send the headers of a request and never its body."""
        return await self._send_and_wait(self._head("POST", REQUESTS, 1000))

    async def hold_headers_back(self, worker: int) -> str:
        """Send the beginning of a request's headers and nothing more."""
        return await self._send_and_wait(b"GET /v2/devices HTTP/1.1\r\nHost: hostile\r\n")

    async def trickle_body(self, worker: int) -> str:
        """Send a body a few bytes at a time."""
        return await self._send_and_wait(self._head("POST", REQUESTS, 600_000), trickle=b" " * TRICKLE_BYTES)

    async def send_chunks(self, worker: int) -> str:
        """Send a body in chunks of one byte each."""
        head = self._head("POST", REQUESTS).replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
        body = json.dumps({"device_profile_name": f"there is no such profile {uuid4()}"}).encode()
        return await self._send_and_wait(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")

    async def read_slowly(self, worker: int) -> str:
        """Ask for a long list and read it a few bytes at a time."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        raw.bind((TENANT_ADDRESS, 0))
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(raw, ("127.0.0.1", self.target.port))
            await loop.sock_sendall(raw, self._head("GET", "/v2/devices"))
            end = time.monotonic() + SLOW_READ_S
            async with asyncio.timeout(PATIENCE_S):
                while time.monotonic() < end and await loop.sock_recv(raw, 256):
                    await asyncio.sleep(TRICKLE_S)
            return "read"
        finally:
            raw.close()

    async def list_everything(self, worker: int) -> str:
        """Ask for a list that is expensive to make."""
        status, _ = await self._call("list", worker, "GET", LISTS[self._chance.randrange(len(LISTS))])
        return str(status)

    async def try_markers(self, worker: int) -> str:
        """Ask for the page after another project's request, and after one that does not exist."""
        path = REQUESTS + "?limit=1&marker="
        foreign, _ = await self._call("markers", worker, "GET", path + self.target.foreign_request)
        unknown, _ = await self._call("markers", worker, "GET", path + str(uuid4()))
        return f"{foreign} as unknown" if foreign == unknown else f"{foreign}, unknown {unknown}"

    async def bind_own(self, worker: int) -> str:
        """Create, bind and delete a request, as instances that come and go do."""
        host, provider = self.target.offers[worker % len(self.target.offers)]
        nova = self.target.nova
        status, body = await self._call("bind", worker, "POST", REQUESTS, {"device_profile_name": "one"}, nova)
        found = json.loads(body)
        if status != 201 or not found:
            return str(status)
        uuid = found["arqs"][0]["uuid"]
        values = zip(BIND, (host, provider, str(uuid4())), strict=True)
        patch = {uuid: [{"op": "add", "path": f"/{name}", "value": value} for name, value in values]}
        status, _ = await self._call("bind", worker, "PATCH", REQUESTS, patch, nova)
        await self._call("bind", worker, "DELETE", f"{REQUESTS}?arqs={uuid}", None, nova)
        return str(status)

    async def subscribe(self, worker: int) -> str:
        """Subscribe a crafted address, or have a test message sent to a receiver that never answers."""
        if not self._subscription:
            hook = {"name": "hostile-hook", "kinds": ["request.bound"], "way": "webhook", "target": self.target.webhook}
            status, body = await self._call("subscribe", worker, "POST", "/api/subscriptions/", hook)
            self._subscription = json.loads(body).get("uuid", "none") if status == 201 else ""
            return f"webhook {status}"
        if self._chance.random() < 0.5:
            letter = {"name": "x", "kinds": ["request.bound"], "way": "email"}
            letter |= {"target": self._chance.choice(CRAFTED_ADDRESSES)}
            status, _ = await self._call("subscribe", worker, "POST", "/api/subscriptions/", letter)
            return f"crafted {status}"
        status, _ = await self._call("subscribe", worker, "POST", f"/api/subscriptions/{self._subscription}/test/")
        return f"test {status}"

    def _head(self, method: str, path: str, length: int | None = None, tokens: dict[str, str] | None = None) -> bytes:
        """Return the line and headers of a request."""
        named = "".join(f"{name}: {value}\r\n" for name, value in (tokens or self.target.tokens).items())
        size = "" if length is None else f"Content-Length: {length}\r\n"
        kind = "Content-Type: application/json\r\n" if method in ("POST", "PATCH") else ""
        return f"{method} {path} HTTP/1.1\r\nHost: hostile\r\nAccept: */*\r\n{named}{kind}{size}\r\n".encode()

    async def _open(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.target.port, local_addr=(address, 0), limit=2**26)

    async def _send_and_wait(self, data: bytes, trickle: bytes = b"") -> str:
        """Send `data` on a new connection, then `trickle` again and again; return the status of the answer."""
        reader, writer = await self._open(TENANT_ADDRESS)
        trickling = None

        async def send_on() -> None:
            with suppress(OSError):
                while True:
                    await asyncio.sleep(TRICKLE_S)
                    writer.write(trickle)
                    self.sent_bytes += len(trickle)

        try:
            writer.write(data)
            self.sent_bytes += len(data)
            trickling = asyncio.create_task(send_on()) if trickle else None
            async with asyncio.timeout(PATIENCE_S):
                status, _ = await _read_answer(reader)
            return str(status)
        finally:
            if trickling:
                trickling.cancel()
            writer.transport.abort()

    async def _call(
        self,
        kind: str,
        worker: int,
        method: str,
        path: str,
        body: object = None,
        tokens: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Send a request on this worker's persistent connection and return the status and the body of the answer. Raise
        AnsweredError if the server is busy."""
        at = (kind, worker)
        for is_last in (False, True):
            if at not in self._clients or self._clients[at][1].is_closing() or self._clients[at][0].at_eof():
                self._clients[at] = await self._open(TENANT_ADDRESS)
            reader, writer = self._clients[at]
            content = b"" if body is None else json.dumps(body).encode()
            data = self._head(method, path, len(content) if method != "GET" else None, tokens) + content
            writer.write(data)
            self.sent_bytes += len(data)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    status, answer = await _read_answer(reader)
                if status == 503:
                    raise AnsweredError("503")
                break
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                writer.transport.abort()
                del self._clients[at]
                if is_last:
                    raise
        return status, answer


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the status and the body of an answer; raise AnsweredError `closed` if the connection ends before it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        raise AnsweredError("closed") from None
    found = LENGTH.search(head)
    return int(head[9:12]), await reader.readexactly(int(found[1])) if found else b""


def make_report_parts(variant: int, victim: str) -> tuple[str, str, str]:
    """Return the text of an urgent report in three pieces, between which `seq` and a hash of 40 characters belong.

    Its devices are in no report of another variant. A second driver claims the first provider of the host `victim`.
    """
    seq, name = 987654321, "#" * 40
    found = messages.devices(NEW_DEVICES, REPORTING_HOST)
    stolen = messages.devices(1, victim)
    report = wire.Report(
        1,
        seq,
        name,
        (DriverReport("bench_driver", "", found), DriverReport("stealing_driver", "", stolen)),
        urgent=True,
    )
    text = wire.encode_message(report)
    own, stealing, rest = text.partition('"stealing_driver"')
    for plain, domain in (("0000:", f"{variant:04x}:"), ('\\"0000\\"', f'\\"{variant:04x}\\"')):
        own = own.replace(plain, domain)
    text = own + stealing + rest
    head, _, rest = text.partition(str(seq))
    middle, _, tail = rest.partition(name)
    return head, middle, tail


ATTACKS: dict[str, Attack] = {
    "reports": Attack(HostileNeighbours.send_report, 1, 100.0),
    "oversized": Attack(HostileNeighbours.send_oversized, 1, 2.0),
    "forged": Attack(HostileNeighbours.forge_handshake, 8, 40.0),
    "no body": Attack(HostileNeighbours.hold_body_back, 40, 20.0),
    "no headers": Attack(HostileNeighbours.hold_headers_back, 20, 10.0),
    "trickle": Attack(HostileNeighbours.trickle_body, 20, 10.0),
    "chunks": Attack(HostileNeighbours.send_chunks, 2, 5.0),
    "slow readers": Attack(HostileNeighbours.read_slowly, 10, 5.0),
    "list": Attack(HostileNeighbours.list_everything, 100, 30.0),
    "markers": Attack(HostileNeighbours.try_markers, 1, 2.0),
    "bind": Attack(HostileNeighbours.bind_own, 2, 4.0),
    "subscribe": Attack(HostileNeighbours.subscribe, 1, 2.0),
}
"""All attacks, by the name under which their outcomes are shown."""


if __name__ == "__main__":
    serve_calls(HostileNeighbours)
