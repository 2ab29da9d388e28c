"""The certificate of the agents' listener is replaced without new join tokens, also for a host that was away.

The agents are the real link of `agents.host`, each with a journal and a key of its own, without drivers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from agents import credentials, wire
from agents.certificates import compute_fingerprint
from agents.host.backoff import ConnectionTiming
from agents.host.connection.http import GatewayEndpoint
from agents.host.connection.identity import load_or_create_keys
from agents.host.connection.link import GatewayLink
from agents.host.journal.journal import open_journal
from agents.host.main import _choose_gateway
from cyborgweb.cli.main import cli
from tests.system.product import Product, running

pytestmark = pytest.mark.system
COUNT = 200
AWAY = "cmp-0"
RETURN_S = 60.0
INVITE = """
INSERT INTO agents_jointoken (host_name, secret_hash, public_key, created_by, expires_at)
SELECT name, secret, '', 'test', now() + interval '1 hour'
FROM unnest(%s::text[], %s::text[]) AS x(name, secret) RETURNING id
"""
CONNECTED = """
SELECT h.name, a.newest_certificate FROM agents_agent a JOIN accelerators_host h ON h.id = a.host_id
JOIN agents_lease l ON l.host_id = h.id WHERE h.name LIKE 'cmp-%%' AND l.seen_at > to_timestamp(%s)
"""


@dataclass
class Fleet:
    """The hosts of the test: their folders and join tokens, and the links that run."""

    folder: Path
    tokens: dict[str, str]
    tasks: dict[str, asyncio.Task[None]]

    def start(self, name: str) -> None:
        """Start the link of a host, as `cyborg-agent` starts it, with the join token still in its environment."""
        directory = self.folder / name
        directory.mkdir(mode=0o700, exist_ok=True)
        journal, keys = open_journal(directory, name), load_or_create_keys(directory, name, name)
        gateway = _choose_gateway(credentials.parse_join_string(self.tokens[name]), journal.gateway)
        assert isinstance(gateway, GatewayEndpoint)
        timing = ConnectionTiming(first_backoff_s=0.5, max_backoff_s=3.0)
        link = GatewayLink(journal, keys, gateway, wire.Hello("1", "boot", ()), lambda _: None, timing)
        self.tasks[name] = asyncio.ensure_future(link.run())
        self.tasks[name].add_done_callback(lambda _: journal.close())

    async def stop(self, *names: str) -> None:
        """Stop the links of these hosts."""
        stopped = [self.tasks.pop(name) for name in names]
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, return_exceptions=True)


@asynccontextmanager
async def running_fleet(folder: Path, tokens: dict[str, str]) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder, tokens, {})
    try:
        for name in tokens:
            fleet.start(name)
        yield fleet
    finally:
        await fleet.stop(*fleet.tasks)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return tmp_path / "announcement.key"


@pytest.fixture
def product(tmp_path: Path, key: Path) -> Iterator[Product]:
    made = CliRunner().invoke(cli, ["announcement-key", str(key)])
    settings = {
        "CYBORG_AGENT_LISTEN": f"127.0.0.1:{find_free_port()}",
        "CYBORG_AGENT_ANNOUNCEMENT_KEY": made.stdout.strip(),
        "CYBORG_BEAT_S": "2",
        "CYBORG_LEASE_FLUSH_S": "1",
    }
    with running(Product(tmp_path / "state", settings)) as started:
        yield started


def invite(product: Product, names: list[str]) -> dict[str, str]:
    """Make a join token for each host. Every fourth was made before there was an announcement key."""
    shown = json.loads("\n".join(product.manage("agent_certificate", "--json")))
    made = {name: secrets.token_urlsafe(24) for name in names}
    digests = [hashlib.sha256(secret.encode()).hexdigest() for secret in made.values()]
    product.rows(INVITE, list(made), digests)
    address = f"https://{product.settings['CYBORG_AGENT_LISTEN']}"
    return {
        name: credentials.encode_join_string(
            address, shown["fingerprint"], name, secret, shown["announcement_key"] if at % 4 else ""
        )
        for at, (name, secret) in enumerate(made.items())
    } | {
        AWAY: credentials.encode_join_string(address, shown["fingerprint"], AWAY, made[AWAY], shown["announcement_key"])
    }


async def until_connected(product: Product, names: set[str], newest: Path) -> None:
    """Wait until exactly these hosts renew their leases and accept this certificate as the newest."""
    fingerprint = compute_fingerprint(newest.read_bytes())
    (begin,) = product.rows("SELECT extract(epoch FROM now())")[0]
    async with asyncio.timeout(3 * RETURN_S):
        while {name for name, known in product.rows_or_empty(CONNECTED, begin) if known == fingerprint} != names:
            await asyncio.sleep(0.5)


async def restart_with(product: Product, certificate: str) -> None:
    """Stop the product and start it with another certificate."""
    await asyncio.to_thread(product.interrupt)
    product.settings["CYBORG_AGENT_CERT"] = certificate
    await asyncio.to_thread(product.start)


def test_200_agents_follow_a_replaced_certificate_and_one_of_them_was_away(
    tmp_path: Path, product: Product, key: Path
) -> None:
    old, new = product.state / "agent-tls.pem", tmp_path / "new.pem"

    async def story() -> None:
        tokens = invite(product, [f"cmp-{number}" for number in range(COUNT)])
        everybody = set(tokens)
        async with running_fleet(tmp_path / "hosts", tokens) as fleet:
            await until_connected(product, everybody, old)
            await fleet.stop(AWAY)

            product.manage("agent_certificate", "--new", str(new))
            words = [
                "--replaces",
                old,
                "--certificate",
                new,
                "--key",
                key,
                "--to",
                product.state / "agent-announcements",
            ]
            announced = CliRunner().invoke(cli, ["announce-certificate", *map(str, words)])
            assert announced.exit_code == 0, announced.output
            await until_connected(product, everybody - {AWAY}, new)
            shown = json.loads("\n".join(product.manage("agent_certificate", "--json")))
            assert shown["without_newest"] == [AWAY]

            await restart_with(product, str(new))
            await until_connected(product, everybody - {AWAY}, new)
            fleet.start(AWAY)
            await until_connected(product, everybody, new)

            await restart_with(product, str(old))  # in the period in which both are good, one can go back
            await until_connected(product, everybody, new)

    (tmp_path / "hosts").mkdir()
    asyncio.run(story())
    assert "the signature does not fit" not in product.log()
