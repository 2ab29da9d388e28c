"""The ASGI application of REST processes, which granian runs: the APIs and the console, without sockets and agents."""

from __future__ import annotations

from typing import Any

from cyborgweb.settings.keys import get_keys
from cyborgweb.wsgi import application as wsgi  # sets up Django, which the next import needs

from cyborgweb.http.django_threads import DjangoThreads  # isort: skip

django_threads = DjangoThreads(wsgi, get_keys())


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Serve HTTP requests; refuse WebSockets."""
    if scope["type"] == "http":
        await django_threads(scope, receive, send)
    else:
        await send({"type": "websocket.close"})
