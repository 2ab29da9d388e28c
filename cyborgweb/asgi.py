"""The ASGI application of the web process: agents' sockets on the event loop, Django in a bounded set of threads.

The event loop must never wait for the database (measured: an ORM call in a consumer makes every agent wait for it).
"""

from __future__ import annotations

import os
import re
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from a2wsgi import WSGIMiddleware  # noqa: E402  (these imports need Django's registry)
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
"""Paths of requests that may take long: they wait for work on a host, for answers of agents, or for an upload over a
slow connection. They have their own threads, so that other requests are not delayed."""
EXPORT = re.compile(r"\A/admin/.*/export\.[a-z]+\Z")
"""Paths of exports, which take as long as the client needs to read them."""
LONG_THREADS = 12
"""More threads than the separate limits of `PATCH …/program`, uploads, exports and censuses allow together, so that a
request beyond its limit is refused at once and does not wait for a thread."""
ELSEWHERE = b'{"error": "This address is for agents only: the console and the APIs are served at another address."}'


class BoundedThreads:
    """Runs a WSGI application on `threads` threads. At most `queue` requests wait; further ones get 503 at once."""

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
    """The HTTP application. Answers agents, load queries of our other processes, and usage streams on the event loop.

    All other requests go to Django: on the threads of `long` if they may take long, otherwise on those of `django`.
    """

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
    """Return the application that serves images to agents, which authenticate with this gateway's challenges."""
    return Imagery(gateway.challenges, gateway.refusals)


class AgentsOnly:
    """The application of the TLS listener: serves only the challenge, images and agents' sockets.

    Agents either pin `fingerprint`, or pin nothing and verify the certificate with its authorities.
    """

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
    """Tell the gateway its own URL, before the process serves: CYBORG_GATEWAY_URL, or `address` if that is not set."""
    gateway.reached_at(keys().gateway_url or address)


def end() -> None:
    """End the usage streams before a shutdown. They never end by themselves, so the server would wait for them."""
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
