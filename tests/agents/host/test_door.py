"""Several gateways behind one name or one balancer: an agent answers a challenge where it was made."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from agents.host.connection.http import GatewayEndpoint
from tests.agents.host.standin import QUICK, StandIn, until
from tests.agents.host.test_link import ONE, agent


def test_a_challenge_that_another_gateway_made_is_asked_for_again_soon(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn(refuse=[(401, json.dumps({"error": "the challenge is unknown", "code": "challenge"}), {})])
        async with server.open(), agent(tmp_path, server.gateway(), pace=replace(QUICK, refused_delay_s=3600)):
            await until(lambda: server.hellos)

    asyncio.run(story())


def test_a_challenge_is_answered_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name leads to two gateways and one that is gone; who looks it up again gets the two the other way round."""

    async def story() -> None:
        async with StandIn().open() as one, StandIn(at="127.0.0.2", port=one.port).open() as other:
            both = [one.at, other.at]

            async def looked_up(_: str, port: int, **__: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
                both.reverse()
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, port)) for at in ("127.0.0.3", *both)]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", looked_up)
            async with agent(tmp_path, GatewayEndpoint(f"http://gateways.example:{one.port}", "")) as host:
                host.sees(*ONE)
                await until(lambda: host.journal.acknowledged)
            assert sorted(map(len, (one.requests, other.requests))) == [0, 2]

    asyncio.run(story())
