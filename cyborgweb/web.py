"""`python -m cyborgweb.web`: uvicorn on sockets that the supervisor has bound, so a restart of web loses no caller.

With CYBORG_AGENT_LISTEN a second socket speaks TLS to agents, in the same process and with the same gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import ssl
from typing import Any

import uvicorn

from cyborgweb.settings.keys import keys
from drivers.process import die_with_parent

HANDSHAKE_S = 10.0


def main() -> None:
    """Serve until SIGTERM; `--fd` is an inherited, listening socket."""
    parser = argparse.ArgumentParser(prog="cyborgweb.web", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of a listening socket")
    parser.add_argument("--agent-fd", type=int, help="the same for the agents' TLS listener")
    parser.add_argument("--after", type=int, help="file descriptor of a pipe: serve when its other end is closed")
    arguments = parser.parse_args()
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # a line for every agent that comes and goes
    from cyborgweb.asgi import application

    server = Server(configured(application))
    if arguments.agent_fd is not None:
        from cyborgweb import tls
        from cyborgweb.asgi import AgentsOnly, gateway

        agents = configured(AgentsOnly(gateway, tls.fingerprint(keys())))
        server.beside(socket.socket(fileno=arguments.agent_fd), agents, tls.context(keys()))
    _settle_memory()
    if arguments.after is not None:
        os.read(arguments.after, 1)
    server.run(sockets=[socket.socket(fileno=arguments.fd)])


def configured(application: Any) -> uvicorn.Config:
    """What holds for both sockets."""
    return uvicorn.Config(
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


class Server(uvicorn.Server):
    """uvicorn with a second listener: it is started and stopped with the first, and shares its connections' fate."""

    _beside: tuple[socket.socket, uvicorn.Config, ssl.SSLContext] | None = None

    def beside(self, listener: socket.socket, config: uvicorn.Config, context: ssl.SSLContext) -> None:
        """Serve `config`'s application on `listener` as well, over TLS. Called before `run`."""
        self._beside = listener, config, context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open both."""
        await super().startup(sockets)
        if self._beside is None:
            return
        listener, config, context = self._beside
        config.load()

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        loop = asyncio.get_running_loop()
        opened = await loop.create_server(
            protocol, sock=listener, ssl=context, backlog=config.backlog, ssl_handshake_timeout=HANDSHAKE_S
        )
        self.servers.append(opened)


def _settle_memory() -> None:
    """What is loaded stays for good, and a thousand agents at once are no garbage: look at less, less often.

    A storm of connections is a fifth faster for it (measured).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


if __name__ == "__main__":
    main()
