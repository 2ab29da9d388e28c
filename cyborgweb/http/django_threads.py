"""Chooses the threads on which Django runs a request: those for short requests, or those for long ones."""

from __future__ import annotations

import re
from typing import Any

from cyborgweb.http.bodies import BodyReader
from cyborgweb.http.deadlines import make_client_limits
from cyborgweb.http.request_threads import RequestThreads
from cyborgweb.settings.keys import Keys

UPLOAD_PATH = re.compile(r"\A/api/images/?\Z")
LONG_PATHS = re.compile(r"/deployables/[^/]+/program(?:[/.]|\Z)|\A/(?:api|admin)/census/?\Z")
"""Paths of requests that may take long: they wait for work on a host, or for answers of agents. They and uploads have
their own threads, so that other requests are not delayed."""
EXPORT_PATHS = re.compile(r"\A/admin/.*/export\.[a-z]+\Z")
"""Paths of exports, which take as long as the client needs to read them."""
LONG_THREADS = 12
"""More threads than the separate limits of `PATCH …/program`, uploads, exports and censuses allow together, so that a
request beyond its limit is refused at once and does not wait for a thread."""


class DjangoThreads:
    """The ASGI application that runs Django's WSGI application `django` on threads.

    There are `threads` threads for short requests and LONG_THREADS for long ones. One BodyReader reads all bodies.
    """

    def __init__(self, django: Any, keys: Keys, long_threads: int = LONG_THREADS) -> None:
        limits = make_client_limits(keys)
        bodies = BodyReader(limits.body_s, limits.body_buffer_bytes)
        self.short = RequestThreads(django, keys.request_threads, keys.request_queue, limits, bodies)
        self.long = RequestThreads(django, long_threads, keys.request_queue, limits, bodies)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the request on the threads that its path and method choose."""
        path, may_write = scope["path"], scope["method"] in ("PATCH", "POST")
        if may_write and UPLOAD_PATH.search(path):
            await self.long(scope, receive, send, streams_body=True)
        elif EXPORT_PATHS.search(path) or (may_write and LONG_PATHS.search(path)):
            await self.long(scope, receive, send)
        else:
            await self.short(scope, receive, send)
