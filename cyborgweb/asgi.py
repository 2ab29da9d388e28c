"""The ASGI application of the web process: agents' sockets on the event loop, Django in a bounded set of threads.

The event loop must never wait for the database (measured: an ORM call in a consumer makes every agent wait for it).
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from a2wsgi import WSGIMiddleware  # noqa: E402  (these imports need Django's registry)
from channels.routing import ProtocolTypeRouter, URLRouter  # type: ignore[import-untyped]  # noqa: E402  (untyped)
from django.urls import re_path  # noqa: E402

from accelerators.api.own.errors import build_error_body  # noqa: E402
from agents.gateway.asgi_app import AgentGateway  # noqa: E402
from agents.gateway.image_server import ImageServer  # noqa: E402
from agents.gateway.sample_rpc import PATH as LOAD_PATH  # noqa: E402
from agents.gateway.sample_rpc import SampleEndpoint  # noqa: E402
from agents.wire import AGENT_PATH, CHALLENGE_PATH, IMAGE_PATH  # noqa: E402
from cyborgweb.live.socket import ConsoleSocket  # noqa: E402
from cyborgweb.live.usage import UsageStream  # noqa: E402
from cyborgweb.monitoring.served import busy_refusals  # noqa: E402
from cyborgweb.settings.keys import get_keys  # noqa: E402
from cyborgweb.wsgi import application as wsgi  # noqa: E402

BUSY_MESSAGE = "The service is busy: try again in a second."
BUSY_BODY = json.dumps({"error_message": BUSY_MESSAGE}).encode()
OWN_API_BUSY_BODY = json.dumps({"error_message": BUSY_MESSAGE} | build_error_body(503, BUSY_MESSAGE)).encode()
"""The body of the same answer below `/api/`, with the field `error` that every error answer has there."""
LONG_PATHS = re.compile(r"/deployables/[^/]+/program(?:[/.]|\Z)|\A/api/images/?\Z|\A/(?:api|admin)/census/?\Z")
"""Paths of requests that may take long: they wait for work on a host, for answers of agents, or for an upload over a
slow connection. They have their own threads, so that other requests are not delayed."""
EXPORT_PATHS = re.compile(r"\A/admin/.*/export\.[a-z]+\Z")
"""Paths of exports, which take as long as the client needs to read them."""
LONG_THREADS = 12
"""More threads than the separate limits of `PATCH …/program`, uploads, exports and censuses allow together, so that a
request beyond its limit is refused at once and does not wait for a thread."""
WRONG_LISTENER_BODY = (
    b'{"error": "This address is for agents only: the console and the APIs are served at another address."}'
)


class BoundedThreads:
    """Runs a WSGI application on `threads` threads. At most `queue` further requests wait for a thread; all others get
    503 at once.
    """

    def __init__(self, application: Any, threads: int, queue: int) -> None:
        self._app = WSGIMiddleware(application, workers=threads)
        self._limit = threads + queue
        self.active_requests = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the request on a thread, or answer 503 with Retry-After if `threads` + `queue` requests are under way."""
        if self.active_requests >= self._limit:
            busy_refusals.inc()
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            body = OWN_API_BUSY_BODY if scope["path"].startswith("/api/") else BUSY_BODY
            await send({"type": "http.response.body", "body": body})
            return
        self.active_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.active_requests -= 1


class HttpApplication:
    """The HTTP application. Answers agents, load queries of our other processes, and usage streams on the event loop.

    All other requests go to Django: on the threads of `long` if they may take long, otherwise on those of `django`.
    """

    def __init__(self, gateway: AgentGateway, django: BoundedThreads, long: BoundedThreads) -> None:
        self._gateway, self._django, self._long_requests = gateway, django, long
        self._image_server, self._sample_queries = make_image_server(gateway), SampleEndpoint(gateway.sample_cache)
        self.usage = UsageStream(django)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request to the application that its path, method and Accept header choose."""
        if scope["path"] == CHALLENGE_PATH:
            await self._gateway.serve_challenge(scope, receive, send)
        elif scope["path"] == LOAD_PATH:
            await self._sample_queries(scope, receive, send)
        elif self.usage.accepts(scope):
            await self.usage(scope, receive, send)
        elif scope["path"].startswith(IMAGE_PATH):
            await self._image_server(scope, receive, send)
        elif EXPORT_PATHS.search(scope["path"]) or (
            scope["method"] in ("PATCH", "POST") and LONG_PATHS.search(scope["path"])
        ):
            await self._long_requests(scope, receive, send)
        else:
            await self._django(scope, receive, send)


def make_image_server(gateway: AgentGateway) -> ImageServer:
    """Return the application that serves images to agents, which authenticate with this gateway's challenges."""
    return ImageServer(gateway.challenges, gateway.refusals)


class AgentApplication:
    """The application of the TLS listener: serves only the challenge, images and agents' sockets.

    Agents either pin `fingerprint`, or pin nothing and verify the certificate with its authorities.
    """

    def __init__(self, gateway: AgentGateway, fingerprint: str) -> None:
        self._gateway, self._fingerprints = gateway, (fingerprint, "")
        self._image_server = make_image_server(gateway)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve an agent. Other HTTP requests get 404, and other WebSockets are refused."""
        if scope["type"] == "http" and scope["path"] == CHALLENGE_PATH:
            await self._gateway.serve_challenge(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].startswith(IMAGE_PATH):
            await self._image_server(scope, receive, send, self._fingerprints)
        elif scope["type"] == "http":
            await send(
                {"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": WRONG_LISTENER_BODY})
        elif scope["path"] == AGENT_PATH:
            await self._gateway.serve_connection(scope, receive, send, self._fingerprints)
        else:
            await send({"type": "websocket.close"})


def set_gateway_url(address: str) -> None:
    """Set the URL at which our other processes reach this gateway: CYBORG_GATEWAY_URL, or `address` if that is not set.

    Must be called before the process serves.
    """
    gateway.set_public_url(get_keys().gateway_url or address)


def end_usage_streams() -> None:
    """End the usage streams before a shutdown. They never end by themselves, so the server would wait for them."""
    http.usage.end_all_streams()


gateway = AgentGateway(get_keys())
http = HttpApplication(
    gateway,
    BoundedThreads(wsgi, get_keys().request_threads, get_keys().request_queue),
    BoundedThreads(wsgi, LONG_THREADS, get_keys().request_queue),
)
sockets: dict[str, Any] = {r"^ws/agent$": gateway, r"^ws/console$": ConsoleSocket()}
"""ASGI applications, which Channels routes with Django's `re_path`, although that is typed for views only."""
application = ProtocolTypeRouter(
    {"http": http, "websocket": URLRouter([re_path(path, socket) for path, socket in sockets.items()])}
)
