"""A gateway for each test and one web server for each file, because starting a server takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agents.gateway.asgi_app import AgentGateway
from cyborgweb.settings.keys import Keys
from tests.support.webserver import serving
from tests.support.wireagent import WireAgent, make_join_secret


class GatewaySlot:
    """An ASGI application that passes every connection to the gateway of the current test."""

    gateway: Any = None
    port = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the gateway's HTTP or WebSocket application, as `cyborgweb.asgi` does."""
        await (self.gateway.serve_challenge if scope["type"] == "http" else self.gateway)(scope, receive, send)


@pytest.fixture(scope="module")
def gateway_slot() -> Iterator[GatewaySlot]:
    made = GatewaySlot()
    with serving(made) as made.port:
        yield made


@pytest.fixture
def gateway() -> Iterator[AgentGateway]:
    """Return a gateway that writes leases at once; a file that needs other settings has its own."""
    made = AgentGateway(Keys(lease_flush_s=0.05))
    yield made
    made.stop()


@pytest.fixture
def agent(gateway: AgentGateway, gateway_slot: GatewaySlot) -> WireAgent:
    """Return an agent that can join as host `cmp1` at the gateway of this test.

    A test file that uses another gateway has a fixture of its own.
    """
    gateway_slot.gateway = gateway
    return WireAgent(gateway_slot.port, token=make_join_secret())
