"""A minimal agent with a real key, challenge and socket, for tests of the conductor's side of the wire protocol."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from agents import authentication, credentials, wire
from tests.support.webserver import PATIENCE

ANSWER_S = PATIENCE * 20.0
"""Seconds to wait for an answer of the gateway, also to a TLS handshake, as long as `webserver.until` waits for a
condition. The gateway runs in a thread of the test's process: on a busy machine, ten seconds may not be enough."""


@dataclass
class WireAgent:
    """An agent of one host. `connect` authenticates it at the gateway on `port` of 127.0.0.1.

    `node` is the host's name unless it is given.
    """

    port: int
    host: str = "cmp1"
    node: str = ""
    token: str = ""
    epoch: int = 1
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    versions: tuple[str, ...] = wire.VERSIONS
    boot_id: str = "boot-1"
    fingerprint: str = ""
    tls: ssl.SSLContext | None = None
    welcome: wire.Welcome | None = None

    def __post_init__(self) -> None:
        self.node = self.node or self.host

    @property
    def public_key(self) -> str:
        """The public key as base64url text."""
        return credentials.encode_public_key(self.key.public_key())

    def challenge(self) -> str:
        """Fetch a nonce from the gateway."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        if self.tls:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=ANSWER_S, context=self.tls)
        connection.request("GET", wire.CHALLENGE_PATH)
        nonce: str = json.loads(connection.getresponse().read())["nonce"]
        connection.close()
        return nonce

    def credential(self, nonce: str, **changes: object) -> str:
        """Return the Authorization header; `changes` replace single fields after signing, to forge them."""
        signed = credentials.build_connect_bytes(self.host, self.node, self.epoch, nonce, self.fingerprint)
        signature = credentials.sign_data(self.key, signed)
        fields = {"host": self.host, "node": self.node, "epoch": self.epoch, "nonce": nonce, "token": self.token}
        values = fields | {"public_key": self.public_key, "signature": signature} | changes
        return credentials.encode_authorization(credentials.Credential(**values))  # type: ignore[arg-type]

    def connect(self, authorization: str | None = None) -> ClientConnection:
        """Open a WebSocket and return it after the gateway's Welcome, which is kept in `welcome`.

        Raises websockets' InvalidStatus, with the refusal in its body, if the gateway refuses the agent.
        """
        header = authorization if authorization is not None else self.credential(self.challenge())
        socket = connect(
            f"{'wss' if self.tls else 'ws'}://127.0.0.1:{self.port}{wire.AGENT_PATH}",
            ssl=self.tls,
            additional_headers={"Authorization": header},
            subprotocols=list(self.versions),  # type: ignore[arg-type]
            compression=None,
            open_timeout=ANSWER_S,
            legacy=True,
        )
        welcome = wire.decode_from_gateway(socket.recv(timeout=ANSWER_S))
        assert isinstance(welcome, wire.Welcome)
        self.welcome = welcome
        return socket

    def connect_and_say_hello(self, ops: tuple[str, ...] = ()) -> ClientConnection:
        """Connect, send Hello, and return the socket; `ops` are the command types that the agent accepts."""
        socket = self.connect()
        socket.send(wire.encode_message(wire.Hello("9.9", self.boot_id, (), ops)))
        return socket

    def connect_refused(self, authorization: str | None = None) -> tuple[int, str]:
        """Connect and return the HTTP status and error code of the refusal; fail if the agent is accepted."""
        try:
            self.connect(authorization).close()
        except InvalidStatus as error:
            return error.response.status_code, json.loads(error.response.body)["code"]
        raise AssertionError("it was let in")


def ask(
    socket: ClientConnection, message: wire.Message | str
) -> wire.Ack | wire.Refuse | wire.Welcome | wire.UnknownMessage:
    """Send one message and return the next message from the gateway."""
    socket.send(message if isinstance(message, str) else wire.encode_message(message))
    return wire.decode_from_gateway(socket.recv(timeout=ANSWER_S))


OPS = (
    "install",
    "uninstall",
    "attach",
    "detach",
    "program",
    "partition",
    "reset",
    "health",
    "rescan",
    "logs",
    "report",
)


def receive_command(socket: ClientConnection, timeout: float = ANSWER_S) -> wire.Command:
    """Return the next command that arrives; other messages are dropped."""
    while True:
        message = wire.decode_from_gateway(socket.recv(timeout=timeout))
        if isinstance(message, wire.Command):
            return message


def take_command(socket: ClientConnection, timeout: float = ANSWER_S) -> wire.Command:
    """Return the next command, after sending Taken for it."""
    command = receive_command(socket, timeout)
    socket.send(wire.encode_message(wire.Taken((command.number,))))
    return command


def send_result(
    socket: ClientConnection, command: wire.Command, outcome: str = "succeeded", text: str = "", **more: Any
) -> None:
    """Send the Result of a command; `more` are further fields of Result."""
    socket.send(wire.encode_message(wire.Result(command.number, outcome, text, **more)))  # type: ignore[arg-type]


def receive_result_ack(socket: ClientConnection, timeout: float = ANSWER_S) -> int:
    """Return the number of the next command whose Result is acknowledged; other messages are dropped."""
    while True:
        message = wire.decode_from_gateway(socket.recv(timeout=timeout))
        if isinstance(message, wire.Ack) and message.of == "Result":
            return message.seq


def is_closed(socket: ClientConnection) -> bool:
    """Return True if the gateway closes the socket before it sends anything more; raises TimeoutError after
    ANSWER_S."""
    try:
        socket.recv(timeout=ANSWER_S)
    except ConnectionClosed:
        return True
    return False


def make_join_secret(host: str = "cmp1") -> str:
    """Create a join token for `host` that is valid for an hour; return its secret."""
    join_string = authentication.create_join_token(host, address="http://x", hours=1, created_by="t")
    return credentials.parse_join_string(join_string).secret
