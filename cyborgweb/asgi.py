"""The ASGI application of the web process: agents' sockets on the event loop, Django in a bounded set of threads.

The event loop must never wait for the database (measured: an ORM call in a consumer makes every agent wait for it).
"""

from __future__ import annotations

import os
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from channels.routing import ProtocolTypeRouter, URLRouter  # type: ignore[import-untyped]  # noqa: E402  (untyped)
from django.urls import re_path  # noqa: E402

from agents.gateway.asgi_app import AgentGateway  # noqa: E402
from agents.gateway.image_server import ImageServer  # noqa: E402
from agents.gateway.sample_rpc import PATH as LOAD_PATH  # noqa: E402
from agents.gateway.sample_rpc import SampleEndpoint  # noqa: E402
from agents.wire import AGENT_PATH, CHALLENGE_PATH, IMAGE_PATH  # noqa: E402
from cyborgweb.http.django_threads import DjangoThreads  # noqa: E402
from cyborgweb.live.socket import ConsoleSocket  # noqa: E402
from cyborgweb.live.usage import UsageStream  # noqa: E402
from cyborgweb.monitoring import event_recorder  # noqa: E402
from cyborgweb.settings.keys import get_keys  # noqa: E402
from cyborgweb.wsgi import application as wsgi  # noqa: E402

WRONG_LISTENER_BODY = (
    b'{"error": "This address is for agents only: the console and the APIs are served at another address."}'
)


class HttpApplication:
    """The HTTP application. Answers agents, load queries of our other processes, and usage streams on the event loop.

    All other requests go to Django, whose threads `django` has.
    """

    def __init__(self, gateway: AgentGateway, django: DjangoThreads) -> None:
        self._gateway, self._django = gateway, django
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
        gateway.announcements.own_fingerprint = fingerprint
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


def start_recording() -> None:
    """Start the thread that records this process's slow and refused clients and refused binds as events."""
    event_recorder.start_recording()


def set_gateway_url(address: str) -> None:
    """Set the URL at which our other processes reach this gateway: CYBORG_GATEWAY_URL, or `address` if that is not set.

    Must be called before the process serves.
    """
    gateway.set_public_url(get_keys().gateway_url or address)


def end_usage_streams() -> None:
    """End the usage streams before a shutdown. They never end by themselves, so the server would wait for them."""
    http.usage.end_all_streams()


gateway = AgentGateway(get_keys())
http = HttpApplication(gateway, DjangoThreads(wsgi, get_keys()))
sockets: dict[str, Any] = {r"^ws/agent$": gateway, r"^ws/console$": ConsoleSocket()}
"""ASGI applications, which Channels routes with Django's `re_path`, although that is typed for views only."""
application = ProtocolTypeRouter(
    {"http": http, "websocket": URLRouter([re_path(path, socket) for path, socket in sockets.items()])}
)
