"""`python -m cyborgweb.server.web_server`: uvicorn on sockets that the supervisor has bound.

Because the sockets stay open, no caller is refused while the web process is restarted.

With CYBORG_AGENT_LISTEN a second socket speaks TLS to agents, in the same process and with the same gateway.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from cyborgweb.http.file_limit import raise_file_limit
from cyborgweb.server.garbage import pause_while_loading
from cyborgweb.settings.keys import Keys, get_keys
from drivers.isolation.process import die_with_parent


def main() -> None:
    """Serve on the inherited, listening socket `--fd` until SIGTERM, and on `--agent-fd` with TLS if it is given.

    The code is loaded first; then, with `--after`, this waits until the other end of that pipe is closed.
    """
    parser = argparse.ArgumentParser(prog="cyborgweb.server.web_server", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of a listening socket")
    parser.add_argument(
        "--agent-fd", type=int, help="file descriptor of the listening socket on which agents connect with TLS"
    )
    parser.add_argument("--after", type=int, help="file descriptor of a pipe: serve when its other end is closed")
    arguments = parser.parse_args()
    die_with_parent()
    pause_while_loading()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # INFO logs every agent's connect and disconnect
    raise_file_limit(get_keys().agent_connections, get_keys().http_connections)
    from cyborgweb import asgi

    listener = socket.socket(fileno=arguments.fd)
    connections = make_connection_settings(get_keys())
    server = TwoListenerServer(make_config(asgi.application, connections), asgi.end_usage_streams)
    if arguments.agent_fd is not None:
        from cyborgweb.server import tls

        agents_only = asgi.AgentApplication(asgi.gateway, tls.read_fingerprint(get_keys()))
        agent_config = make_config(agents_only, connections)
        server.add_tls_listener(
            socket.socket(fileno=arguments.agent_fd), agent_config, tls.make_ssl_context(get_keys())
        )
    _tune_garbage_collection()
    if arguments.after is not None:
        os.read(arguments.after, 1)
    asgi.set_gateway_url(find_own_url(listener, get_keys().database_url))
    asgi.start_recording()
    server.run(sockets=[listener])


def find_own_url(listener: socket.socket, database_url: str = "") -> str:
    """Return the URL at which our other processes reach this web process.

    If it listens on all addresses, this is the machine's address on the route to the database, because the other
    processes use the same database; for a database on this machine, or if that address cannot be found, it is the
    loopback address.
    """
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = _find_address_towards(urlsplit(database_url).hostname or "") or {"::": "::1"}.get(host, "127.0.0.1")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _find_address_towards(database: str) -> str:
    """Return this machine's address on the route to the host `database`.

    Returns '' for the embedded database, and when the address cannot be found (logged). It connects a UDP socket,
    which sends nothing; the name may be looked up in DNS.
    """
    if not database:
        return ""
    try:
        family, kind, _, _, address = socket.getaddrinfo(database.partition(",")[0], 5432, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        logging.getLogger(__name__).warning(
            "this machine's address towards the database cannot be found (%s), so other machines cannot reach this"
            " gateway: set CYBORG_GATEWAY_URL",
            error,
        )
        return ""


def make_connection_settings(keys: Keys) -> dict[str, Any]:
    """Return uvicorn's settings for connections: our protocol classes with the limits for HTTP clients; for WebSockets
    messages of at most `max_message_bytes` plus a margin, no compression, and a ping every 30 s. The tests' server uses
    them, too.

    The library's limit is above `max_message_bytes`, so that the application refuses a larger message with its reason.
    """
    from agents.wire import MESSAGE_MARGIN_BYTES
    from cyborgweb.http.deadlines import make_client_limits
    from cyborgweb.http.protocol import make_http_protocol
    from cyborgweb.server.websocket_protocol import WebSocketProtocol

    return {
        "http": make_http_protocol(make_client_limits(keys)),
        "timeout_keep_alive": keys.keep_alive_s,
        "ws": WebSocketProtocol,
        "ws_per_message_deflate": False,
        "ws_max_size": keys.max_message_bytes + MESSAGE_MARGIN_BYTES,
        "ws_ping_interval": 30.0,
        "ws_ping_timeout": 30.0,
    }


def make_config(application: Any, connection_settings: dict[str, Any]) -> uvicorn.Config:
    """Return the uvicorn settings of a listener for this ASGI application.

    Listeners with the same `connection_settings` (`make_connection_settings`) count their HTTP connections together.
    """
    return uvicorn.Config(
        application,
        **connection_settings,
        loop="uvloop",
        lifespan="off",
        access_log=False,
        log_config=None,
        backlog=4096,
        timeout_graceful_shutdown=2,
        server_header=False,
        # Otherwise uvicorn would take the client's address from any X-Forwarded-For that comes from this machine.
        proxy_headers=False,
    )


class TwoListenerServer(uvicorn.Server):
    """A uvicorn server with an optional second listener, which speaks TLS and is started and stopped with the first.

    Both share one set of connections, so a shutdown waits for the connections of both. `on_shutdown` is called at the
    beginning of the shutdown, before uvicorn waits for open connections.
    """

    _second_listener: tuple[socket.socket, uvicorn.Config, ssl.SSLContext] | None = None

    def __init__(self, config: uvicorn.Config, on_shutdown: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_shutdown = on_shutdown

    def add_tls_listener(self, listener: socket.socket, config: uvicorn.Config, context: ssl.SSLContext) -> None:
        """Also serve `config`'s application on `listener`, over TLS. Must be called before `run`."""
        self._second_listener = listener, config, context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams that never end by themselves (`on_shutdown`), then shut down as uvicorn does."""
        self._on_shutdown()
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open both listeners. A TLS handshake may take as long as the headers of a request (CYBORG_HEADER_TIMEOUT_S),
        and both together not longer.
        """
        from cyborgweb.http.protocol import HttpProtocol
        from cyborgweb.server.tls_listener import TlsListener

        await super().startup(sockets)
        if self._second_listener is None:
            return
        listener, config, context = self._second_listener
        config.load()

        def make_protocol() -> HttpProtocol:
            """Return the protocol for one connection to the TLS listener."""
            made: HttpProtocol = config.http_protocol_class(  # type: ignore[assignment,call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        self.servers.append(TlsListener(listener, make_protocol, context))  # type: ignore[arg-type]


def _tune_garbage_collection() -> None:
    """Freeze the loaded objects and make garbage collections rarer.

    A burst of new connections creates no garbage, so this makes it a fifth faster (measured). Only a full collection
    frees the objects that ended connections leave behind. With these thresholds a full collection comes after about 200
    000 objects; if it came more rarely, memory would grow for an hour before it levels off.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 5, 2)


if __name__ == "__main__":
    main()
