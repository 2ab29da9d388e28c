"""One process for everything: agents' sockets on the event loop, Django in a bounded set of threads beside it.

The event loop never waits for the database (measured: an ORM call in a consumer queues every agent behind it).
"""

from __future__ import annotations

import os
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from a2wsgi import WSGIMiddleware  # noqa: E402  (what follows needs Django's registry)
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from django.urls import re_path  # noqa: E402

from agents.gateway import Gateway  # noqa: E402
from agents.wire import CHALLENGE_PATH, PATH  # noqa: E402
from cyborgweb.settings.keys import keys  # noqa: E402
from cyborgweb.wsgi import application as wsgi  # noqa: E402

BUSY = b'{"error_message": "The service is busy: try again in a second."}'
ELSEWHERE = b'{"error": "This is for agents: console and APIs are served at another address."}'


class BoundedThreads:
    """A WSGI application on `threads` threads; at most `queue` requests wait, beyond it the answer is 503 at once."""

    def __init__(self, application: Any, threads: int, queue: int) -> None:
        self._app = WSGIMiddleware(application, workers=threads)
        self._limit = threads + queue
        self.inside = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.inside >= self._limit:
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": BUSY})
            return
        self.inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.inside -= 1


class Http:
    """The challenge is answered on the event loop, everything else by Django."""

    def __init__(self, gateway: Gateway, django: BoundedThreads) -> None:
        self._gateway, self._django = gateway, django

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == CHALLENGE_PATH:
            await self._gateway.challenge(scope, receive, send)
        else:
            await self._django(scope, receive, send)


class AgentsOnly:
    """The TLS listener's application: the challenge and agents' sockets, nothing else. Agents pin `fingerprint`, or
    have the certificate's authorities vouch for it and pin nothing."""

    def __init__(self, gateway: Gateway, fingerprint: str) -> None:
        self._gateway, self._fingerprints = gateway, (fingerprint, "")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == CHALLENGE_PATH:
            await self._gateway.challenge(scope, receive, send)
        elif scope["type"] == "http":
            await send(
                {"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": ELSEWHERE})
        elif scope["path"] == PATH:
            await self._gateway.connect(scope, receive, send, self._fingerprints)
        else:
            await send({"type": "websocket.close"})


gateway = Gateway(keys())
application = ProtocolTypeRouter(
    {
        "http": Http(gateway, BoundedThreads(wsgi, keys().request_threads, keys().request_queue)),
        "websocket": URLRouter([re_path(r"^ws/agent$", gateway)]),
    }
)
