"""`python -m cyborgweb.web`: uvicorn on a socket that the supervisor has bound, so a restart of web loses no caller."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket

import uvicorn

from cyborgweb.settings.keys import keys
from drivers.process import die_with_parent


def main() -> None:
    """Serve until SIGTERM; `--fd` is an inherited, listening socket."""
    parser = argparse.ArgumentParser(prog="cyborgweb.web", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of a listening socket")
    parser.add_argument("--after", type=int, help="file descriptor of a pipe: serve when its other end is closed")
    arguments = parser.parse_args()
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # a line for every agent that comes and goes
    from cyborgweb.asgi import application

    _settle_memory()
    if arguments.after is not None:
        os.read(arguments.after, 1)
    config = uvicorn.Config(
        application,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_max_size=keys().max_message_bytes,
        ws_ping_interval=30.0,
        ws_ping_timeout=30.0,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_config=None,
        backlog=4096,
        timeout_graceful_shutdown=2,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=arguments.fd)])


def _settle_memory() -> None:
    """What is loaded stays for good, and a thousand agents at once are no garbage: look at less, less often.

    A storm of connections is a fifth faster for it (measured).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


if __name__ == "__main__":
    main()
