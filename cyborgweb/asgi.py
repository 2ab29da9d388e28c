"""One process for everything: agents' sockets on the event loop, Django in a bounded set of threads beside it.

The event loop never waits for the database (measured: an ORM call in a consumer queues every agent behind it).
"""

from __future__ import annotations

import os
import re
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from a2wsgi import WSGIMiddleware  # noqa: E402  (what follows needs Django's registry)
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from django.urls import re_path  # noqa: E402

from agents.gateway.app import Gateway  # noqa: E402
from agents.gateway.image_server import Imagery  # noqa: E402
from agents.gateway.sample_rpc import PATH as LOAD_PATH  # noqa: E402
from agents.gateway.sample_rpc import Door  # noqa: E402
from agents.wire import CHALLENGE_PATH, IMAGE_PATH, PATH  # noqa: E402
from cyborgweb.live.socket import Console  # noqa: E402
from cyborgweb.live.usage import Usage  # noqa: E402
from cyborgweb.monitoring.served import busy  # noqa: E402
from cyborgweb.settings.keys import keys  # noqa: E402
from cyborgweb.wsgi import application as wsgi  # noqa: E402

BUSY = b'{"error_message": "The service is busy: try again in a second."}'
LONG = re.compile(r"/deployables/[^/]+/program(?:[/.]|\Z)|\A/api/images/?\Z|\A/(?:api|admin)/census/?\Z")
"""What lasts as long as a host's work, as agents take to answer, or as a caller's line makes it. It has threads of its
own: lists go on."""
EXPORT = re.compile(r"\A/admin/.*/export\.[a-z]+\Z")
"""Takes as long as its reader does."""
LONG_THREADS = 12
"""More than `PATCH …/program`, uploads, exports and censuses take together (their own limits), so that who comes beyond
is told so at once."""
ELSEWHERE = b'{"error": "This is for agents: console and APIs are served at another address."}'


class BoundedThreads:
    """A WSGI application on `threads` threads; at most `queue` requests wait, beyond it the answer is 503 at once."""

    def __init__(self, application: Any, threads: int, queue: int) -> None:
        self._app = WSGIMiddleware(application, workers=threads)
        self._limit = threads + queue
        self.inside = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.inside >= self._limit:
            busy.inc()
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
    """What agents ask for is answered on the event loop, everything else by Django: `long` what may take long."""

    def __init__(self, gateway: Gateway, django: BoundedThreads, long: BoundedThreads) -> None:
        self._gateway, self._django, self._long = gateway, django, long
        self._imagery, self._load = imagery_of(gateway), Door(gateway.board)
        self.usage = Usage(django)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == CHALLENGE_PATH:
            await self._gateway.challenge(scope, receive, send)
        elif scope["path"] == LOAD_PATH:
            await self._load(scope, receive, send)
        elif self.usage.wants(scope):
            await self.usage(scope, receive, send)
        elif scope["path"].startswith(IMAGE_PATH):
            await self._imagery(scope, receive, send)
        elif EXPORT.search(scope["path"]) or (scope["method"] in ("PATCH", "POST") and LONG.search(scope["path"])):
            await self._long(scope, receive, send)
        else:
            await self._django(scope, receive, send)


def imagery_of(gateway: Gateway) -> Imagery:
    """Images for the agents whose challenges this gateway makes."""
    return Imagery(gateway.challenges, gateway.refusals)


class AgentsOnly:
    """The TLS listener's application: the challenge, images and agents' sockets, nothing else. Agents pin
    `fingerprint`, or have the certificate's authorities vouch for it and pin nothing."""

    def __init__(self, gateway: Gateway, fingerprint: str) -> None:
        self._gateway, self._fingerprints = gateway, (fingerprint, "")
        self._imagery = imagery_of(gateway)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == CHALLENGE_PATH:
            await self._gateway.challenge(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].startswith(IMAGE_PATH):
            await self._imagery(scope, receive, send, self._fingerprints)
        elif scope["type"] == "http":
            await send(
                {"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": ELSEWHERE})
        elif scope["path"] == PATH:
            await self._gateway.connect(scope, receive, send, self._fingerprints)
        else:
            await send({"type": "websocket.close"})


def begin(address: str) -> None:
    """The process is about to serve at `address`."""
    gateway.reached_at(keys().gateway_url or address)


def end() -> None:
    """It is about to end: streams have no end of their own, and would be waited for."""
    http.usage.stop()


gateway = Gateway(keys())
http = Http(
    gateway,
    BoundedThreads(wsgi, keys().request_threads, keys().request_queue),
    BoundedThreads(wsgi, LONG_THREADS, keys().request_queue),
)
application = ProtocolTypeRouter(
    {
        "http": http,
        "websocket": URLRouter([re_path(r"^ws/agent$", gateway), re_path(r"^ws/console$", Console())]),
    }
)
