"""What the gateway reads from an upgrade request, and how it refuses one."""

from __future__ import annotations

from typing import Any

from agents import enrolment, wire
from agents.enrolment import Refused


def client_address(scope: Any) -> str:
    """Return the address whose challenges count together."""
    return str((scope.get("client") or ("",))[0])


def choose_version(scope: Any) -> str:
    """Return the best wire version that both ends speak, or raise Refused."""
    for version in wire.VERSIONS:
        if version in scope["subprotocols"]:
            return version
    offered = ", ".join(scope["subprotocols"])[:200] or "none"
    raise Refused(403, "version", f"no common wire version: we speak {', '.join(wire.VERSIONS)}, offered was {offered}")


async def deny_upgrade(scope: Any, send: Any, refused: Refused) -> None:
    """Answer an upgrade request with an HTTP status and one JSON sentence; there is no socket then."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": refused.code})
        return
    headers, body = enrolment.denial(refused)
    await send({"type": "websocket.http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
