"""Run the real ASGI application on a free port, in a thread of the test process; helpers that wait for conditions."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from cyborgweb.settings.keys import Keys


@contextmanager
def serving(application: Any, keys: Keys | None = None, **options: Any) -> Iterator[int]:
    """Run `application` on a free port for the block and yield the port.

    Connections have the product's default settings, without those that `keys` replaces. `options` are passed to
    uvicorn.
    """
    from cyborgweb.server.web_server import make_connection_settings

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    values = make_connection_settings(keys or Keys()) | {"log_config": None, "lifespan": "off"} | options
    server = uvicorn.Server(uvicorn.Config(application, **values))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)


PATIENCE = 3
"""The factor by which a wait may exceed its deadline: the deadline ends a wait, it does not assert a speed."""


def until(condition: Callable[[], Any], deadline_s: float = 20.0) -> Any:
    """Wait until `condition()` is true and return its value; fail after `PATIENCE` times the deadline."""
    end = time.monotonic() + PATIENCE * deadline_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {PATIENCE} × {deadline_s} s: {condition}")


def measure_until(condition: Callable[[], Any], at_most_s: float, what: str, since: float | None = None) -> float:
    """Wait until a promised condition holds; print and return the seconds it took, from `since` (time.monotonic) on.

    Fails if it took longer than `at_most_s`, the promised time, which is not multiplied by `PATIENCE`. The wait goes on
    for `PATIENCE` times that time, so that the failure tells how late the condition came. `since` may lie in the
    future: a condition that holds before that moment fails, too.
    """
    begin = time.monotonic() if since is None else since
    while not condition():
        if time.monotonic() - begin > PATIENCE * at_most_s:
            raise AssertionError(f"{what}: promised within {at_most_s} s, not seen after {PATIENCE * at_most_s} s")
        time.sleep(0.02)
    took = time.monotonic() - begin
    print(f"{what}: {took:.2f} s of at most {at_most_s} s")
    assert took >= 0, f"{what}: {-took:.2f} s too early"
    assert took <= at_most_s, f"{what}: took {took:.2f} s, promised within {at_most_s} s"
    return took
