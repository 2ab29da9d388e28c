"""The ASGI application of REST processes, which granian runs: the APIs and the console, without sockets and agents."""

from __future__ import annotations

from typing import Any

from cyborgweb.settings.keys import get_keys
from cyborgweb.wsgi import application as wsgi  # sets up Django, which the next imports need

from cyborgweb.http.connection_guard import ConnectionGuard  # isort: skip
from cyborgweb.http.deadlines import make_client_limits  # isort: skip
from cyborgweb.http.django_threads import DjangoThreads  # isort: skip
from cyborgweb.http.file_limit import raise_file_limit  # isort: skip
from cyborgweb.monitoring.event_recorder import start_recording  # isort: skip

raise_file_limit(0, get_keys().http_connections)
django_threads = DjangoThreads(wsgi, get_keys())
ConnectionGuard(make_client_limits(get_keys()), django_threads.memory.served_peers.copy).start()
start_recording()


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Serve HTTP requests; refuse WebSockets."""
    if scope["type"] == "http":
        await django_threads(scope, receive, send)
    else:
        await send({"type": "websocket.close"})
