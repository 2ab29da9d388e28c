"""Read the client's address and wire version from an upgrade request, and refuse such a request."""

from __future__ import annotations

from typing import Any

from agents import authentication, wire
from agents.authentication import ConnectionRejectedError


def client_address(scope: Any) -> str:
    """Return the client's IP address, '' if unknown. Challenges are limited per address."""
    return str((scope.get("client") or ("",))[0])


def choose_version(scope: Any) -> str:
    """Return the best wire version that both sides support; raise ConnectionRejectedError (403) if there is none."""
    for version in wire.VERSIONS:
        if version in scope["subprotocols"]:
            return version
    offered = ", ".join(scope["subprotocols"])[:200] or "none"
    raise ConnectionRejectedError(
        403,
        "version",
        f"no common wire version: this server supports {', '.join(wire.VERSIONS)}, the client offers {offered}",
    )


async def deny_upgrade(scope: Any, send: Any, refused: ConnectionRejectedError) -> None:
    """Answer an upgrade request with an HTTP error and a JSON body; no WebSocket is opened.

    If the web server cannot send HTTP responses here, close with code 1008 instead.
    """
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": refused.code})
        return
    headers, body = authentication.build_denial(refused)
    await send({"type": "websocket.http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
