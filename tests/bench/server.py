"""The server under test in its own process: the product's server program, with the product in it or with a ceiling.

`python -m tests.bench.server APPLICATION --fd N`. The ceilings stand under the product's name, so everything that
`cyborgweb.server.web_server` decides (event loop, protocol, limits) is the same for all of them. As APPLICATION
`granian` it is granian, with granian's own arguments.
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
    """The ceiling: takes every socket, answers every message with the same Ack, looks at nothing."""
    if not await _opened(scope, receive, send):
        return
    while (await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": ACK})


async def acknowledging(scope: Any, receive: Any, send: Any) -> None:
    """The ceiling of reports: decodes each message typed and bounded, as it must be, acknowledges it, does no more."""
    if not await _opened(scope, receive, send):
        return
    while (event := await receive())["type"] == "websocket.receive":
        message = wire.decode_from_agent(event["text"])
        if isinstance(message, wire.Report):
            text = f'{{"type":"Ack","seq":{message.seq},"of":"Report"}}'
            del message, event  # five hundred of them kept alive would make the next one slower
            await send({"type": "websocket.send", "text": text})


async def _opened(scope: Any, receive: Any, send: Any) -> bool:
    """Take the socket and welcome its agent; False when it was no socket, but the request for a challenge."""
    if scope["type"] == "http":
        await _challenge(send)
        return False
    await receive()
    await send({"type": "websocket.accept", "subprotocol": wire.VERSIONS[0]})
    await send({"type": "websocket.send", "text": WELCOME})
    return True


async def _challenge(send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(CHALLENGE)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": CHALLENGE})


CEILINGS = {"bare": bare, "acknowledging": acknowledging}


def main() -> None:
    """Serve until killed."""
    name = sys.argv.pop(1)
    die_with_parent()
    if name == "granian":
        os.execv(sys.executable, [sys.executable, "-m", "granian", *sys.argv[1:]])  # the death signal stays
    get_keys()
    if name in CEILINGS:
        stand_in: Any = types.ModuleType("cyborgweb.asgi")
        stand_in.application = CEILINGS[name]
        stand_in.set_gateway_url = stand_in.end_usage_streams = lambda *_: None
        sys.modules["cyborgweb.asgi"] = stand_in
    from cyborgweb.server import web_server

    web_server.main()


if __name__ == "__main__":
    main()
