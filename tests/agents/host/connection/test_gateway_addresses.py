"""Test several gateways behind one name or one load balancer: an agent answers a challenge at the address that made
it."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from agents.host.connection import http
from agents.host.connection.http import GatewayEndpoint
from tests.agents.host.connection.test_link import ONE_DEVICE, run_agent_link
from tests.agents.host.fake_gateway import QUICK, FakeGateway, wait_until


def test_an_agent_retries_at_once_when_its_challenge_is_unknown_to_the_gateway(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway(
            refusals=[(401, json.dumps({"error": "the challenge is unknown", "code": "challenge"}), {})]
        )
        async with server.open(), run_agent_link(tmp_path, server.gateway(), pace=replace(QUICK, refused_delay_s=3600)):
            await wait_until(lambda: server.hellos)

    asyncio.run(story())


def test_an_agent_connects_to_the_address_that_made_its_challenge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has the addresses of two gateways and of one that is gone. Each look-up returns the two in the other
    order."""

    async def story() -> None:
        async with FakeGateway().open() as one, FakeGateway(listen_address="127.0.0.2", port=one.port).open() as other:
            both = [one.listen_address, other.listen_address]

            async def looked_up(_: str, port: int, **__: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
                both.reverse()
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, port)) for at in ("127.0.0.3", *both)]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", looked_up)
            async with run_agent_link(tmp_path, GatewayEndpoint(f"http://gateways.example:{one.port}", "")) as host:
                host.record_report(*ONE_DEVICE)
                await wait_until(lambda: host.journal.acknowledged)
            assert sorted(map(len, (one.requests, other.requests))) == [0, 2]

    asyncio.run(story())


def test_an_address_that_does_not_answer_delays_the_next_one_only_a_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue of the first address is full, so the kernel drops the packets of further connections."""
    monkeypatch.setattr(http, "HAPPY_EYEBALLS_DELAY_S", 0.1)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with FakeGateway().open() as server:
            with socket.socket() as silent, socket.socket() as waiting, socket.socket() as dropped:
                silent.bind(("127.0.0.3", server.port))
                silent.listen(0)
                waiting.connect(silent.getsockname())
                dropped.setblocking(False)
                dropped.connect_ex(silent.getsockname())

                async def looked_up(_: str, port: int, **__: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
                    addresses = ("127.0.0.3", server.listen_address)
                    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, port)) for at in addresses]

                monkeypatch.setattr(loop, "getaddrinfo", looked_up)
                began = loop.time()
                gateway = GatewayEndpoint(f"http://gateways.example:{server.port}", "")
                _, found = await http.fetch_challenge(gateway, None, 30)
                assert found.ip_address == server.listen_address
                assert loop.time() - began >= 0.1, "the first address was tried"

    asyncio.run(story())
