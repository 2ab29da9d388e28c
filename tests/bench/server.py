"""The server under test in its own process: the product's server program, with the product's application or a ceiling.

`python -m tests.bench.server APPLICATION --fd N`. A ceiling replaces the module of the product's application, so
everything that `cyborgweb.server.web_server` decides (event loop, protocol, limits) is the same for all of them.
APPLICATION `granian` runs granian with the remaining arguments.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import msgspec

from agents import credentials, wire
from cyborgweb.settings.keys import get_keys
from drivers.isolation.process import die_with_parent

CHALLENGE = msgspec.json.encode(credentials.Challenge("n" * 24, 30.0, wire.VERSIONS))
WELCOME = wire.encode_message(wire.Welcome(8.0, 1, "0" * 40, wire.MAX_MESSAGE_BYTES))
ACK = '{"type":"Ack","seq":100000,"of":"Report"}'


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """The ceiling of heartbeats and connects: accept each socket, answer each message with the same Ack."""
    if not await _open_socket(scope, receive, send):
        return
    while (await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": ACK})


async def acknowledging(scope: Any, receive: Any, send: Any) -> None:
    """The ceiling of reports: decode each message with types and limits, acknowledge reports, do nothing else."""
    if not await _open_socket(scope, receive, send):
        return
    while (event := await receive())["type"] == "websocket.receive":
        message = wire.decode_from_agent(event["text"])
        if isinstance(message, wire.Report):
            text = f'{{"type":"Ack","seq":{message.seq},"of":"Report"}}'
            del message, event  # 500 messages kept alive would slow down the next one
            await send({"type": "websocket.send", "text": text})


async def _open_socket(scope: Any, receive: Any, send: Any) -> bool:
    """Accept the socket and send the Welcome; answer a request for a challenge and return False."""
    if scope["type"] == "http":
        await _send_challenge(send)
        return False
    await receive()
    await send({"type": "websocket.accept", "subprotocol": wire.VERSIONS[0]})
    await send({"type": "websocket.send", "text": WELCOME})
    return True


async def _send_challenge(send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(CHALLENGE)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": CHALLENGE})


CEILINGS = {"bare": bare, "acknowledging": acknowledging}


def main() -> None:
    """Serve the application that the first argument names until this process is killed."""
    name = sys.argv.pop(1)
    die_with_parent()
    if name == "granian":
        # The parent-death signal survives exec.
        os.execv(sys.executable, [sys.executable, "-m", "granian", *sys.argv[1:]])
    get_keys()
    if name in CEILINGS:
        stand_in: Any = types.ModuleType("cyborgweb.asgi")
        stand_in.application = CEILINGS[name]
        stand_in.set_gateway_url = stand_in.end_usage_streams = stand_in.start_recording = lambda *_: None
        sys.modules["cyborgweb.asgi"] = stand_in
    from cyborgweb.server import web_server

    web_server.main()


if __name__ == "__main__":
    main()
