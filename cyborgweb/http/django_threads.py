"""Chooses the threads on which Django runs a request: those for short requests, or those for long ones."""

from __future__ import annotations

import re
from typing import Any

from cyborgweb.http.deadlines import make_client_limits
from cyborgweb.http.request_threads import RequestThreads, make_client_memory
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

KEPT_FREE_PART = 4
"""One client gets at most all threads for short requests but a quarter, rounded down, so that those of others begin at
once. With fewer than four threads it may get all."""


class DjangoThreads:
    """The ASGI application that runs Django's WSGI application `django` on threads.

    There are CYBORG_REQUEST_THREADS threads for short requests and LONG_THREADS for long ones. All requests share one
    ClientMemory.
    """

    def __init__(self, django: Any, keys: Keys, long_threads: int = LONG_THREADS) -> None:
        limits = make_client_limits(keys)
        self.memory = make_client_memory(limits, keys)
        kept_free = keys.request_threads // KEPT_FREE_PART
        self.short = RequestThreads(django, keys.request_threads, keys.request_queue, limits, self.memory, kept_free)
        self.long = RequestThreads(django, long_threads, keys.request_queue, limits, self.memory)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the request on the threads that its path and method choose."""
        path, may_write = scope["path"], scope["method"] in ("PATCH", "POST")
        if may_write and UPLOAD_PATH.search(path):
            await self.long(scope, receive, send, streams_body=True)
        elif EXPORT_PATHS.search(path) or (may_write and LONG_PATHS.search(path)):
            await self.long(scope, receive, send)
        else:
            await self.short(scope, receive, send)
