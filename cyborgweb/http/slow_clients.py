"""Note which HTTP clients are slow, by their address, so that the console can name them."""

from __future__ import annotations

from typing import Any

from accelerators import slow_neighbours

SLOW_REQUESTS = 10
"""A client is shown as slow if it missed this many deadlines of a minute, or more. People and tools behind a bad line
miss a few."""
SENTENCE = (
    "missed {count} deadlines: it sent the headers or bodies of requests too slowly, or read answers too slowly, and"
    " its connections were ended. It delays nobody. Find out who uses this address; behind a proxy it is that of the"
    " proxy."
)


def note_slow_client(client: Any) -> None:
    """Count that a client has missed a deadline. `client` is the ASGI scope's: (address, port), or None."""
    if client:
        slow_neighbours.note(f"The client {client[0]}", SENTENCE, needed=SLOW_REQUESTS, is_client=True)
