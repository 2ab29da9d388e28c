"""Test key rotation and probes on the agent's side, against a fake gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agents import wire
from tests.agents.host.connection.test_link import run_agent_link
from tests.agents.host.fake_gateway import FakeGateway, wait_until


def test_an_agent_answers_a_probe_with_its_nonce(tmp_path: Path) -> None:
    async def story() -> None:
        asking = FakeGateway(after_welcome=['{"type":"Probe","nonce":"n1"}'])
        async with asking.open() as server, run_agent_link(tmp_path, server.gateway()):
            await wait_until(lambda: server.alive == [wire.Alive("n1")])

    asyncio.run(story())


def test_an_acknowledged_new_key_is_used_at_the_next_connection(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeGateway(after_welcome=['{"type":"Rotate"}']).open() as server:
            async with run_agent_link(tmp_path, server.gateway()) as host:
                await wait_until(
                    lambda: host.link.keys.current_identity.public_key in [told.public_key for told in server.new_keys]
                )
                server.after_welcome = []
                await server.sockets[-1].close()
                await wait_until(lambda: len(server.credentials) == 2)
            first, second = server.credentials
            assert first.public_key != second.public_key == server.new_keys[0].public_key

    asyncio.run(story())


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_an_agent_tries_both_keys_when_the_acknowledgement_of_the_new_one_was_lost(
    tmp_path: Path, committed: bool, killed: bool
) -> None:
    """The gateway goes away, or the agent is killed, before the Ack. The agent finds out which key the gateway
    knows."""

    async def story() -> None:
        server = FakeGateway(after_welcome=['{"type":"Rotate"}'], acknowledge_keys=False)
        async with server.open():
            async with run_agent_link(tmp_path, server.gateway()) as host:
                await wait_until(lambda: server.new_keys)
                first, coming = server.credentials[0].public_key, server.new_keys[0].public_key
                server.after_welcome, server.acknowledge_keys = [], True
                if committed:
                    server.refusals = [(403, '{"error": "not enrolled", "code": "not-enrolled"}', {})]
                if not killed:
                    await server.sockets[-1].close()
                    await wait_until(lambda: len(server.hellos) == 2)
                    assert host.link.keys.current_identity.public_key == (coming if committed else first)
            if killed:
                async with run_agent_link(tmp_path, server.gateway()) as host:
                    await wait_until(lambda: len(server.hellos) == 2)
            assert [one.public_key for one in server.credentials][1:] == ([first, coming] if committed else [first])

    asyncio.run(story())


def test_a_barred_key_is_replaced_by_a_new_one_that_joins_with_the_same_token(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway(refusals=[(403, '{"error": "barred", "code": "key-barred"}', {})])
        async with server.open(), run_agent_link(tmp_path, server.gateway("tok")) as host:
            await wait_until(lambda: server.hellos)
            first, second = server.credentials
            assert (first.token, second.token) == ("tok", "tok")
            assert first.public_key != second.public_key == host.link.keys.current_identity.public_key

    asyncio.run(story())
