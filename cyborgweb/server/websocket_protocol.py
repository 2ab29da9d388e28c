"""uvicorn's WebSocket protocol, with two additions that agents' connections need."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from agents.wire import MESSAGE_ERROR_KEY


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Tells the application why a message was not delivered to it, and keeps uvicorn from logging a refused upgrade as
    an error.
    """

    def handle_parser_exception(self) -> None:
        """If this server closes the connection, because a message broke the protocol or a limit, store the close code
        and the reason in `scope["state"]`. Then close the connection as uvicorn does.

        The application cannot tell it from the code of the disconnect event, because that is the same when the peer
        closes with this code.
        """
        if self.handshake_initiated and self.conn.close_sent is not None:
            self.scope["state"][MESSAGE_ERROR_KEY] = (int(self.conn.close_sent.code), self.conn.close_sent.reason)
        super().handle_parser_exception()

    async def send(self, message: Any) -> None:
        """Send the application's message. If it ends an HTTP response that refuses the upgrade, mark the handshake as
        complete.

        Otherwise uvicorn would log the error "ASGI callable returned without completing handshake".
        """
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True
