"""Test that an agent joins over the pinned TLS listener for agents, and is disconnected when it is revoked."""

from __future__ import annotations

import http.client
import ssl
import stat
import uuid

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agents import credentials, wire
from tests.support.wireagent import WireAgent, ask, is_closed
from tests.system.product import Product
from tests.system.test_trust import agent_states

pytestmark = pytest.mark.system

CLOSED_S = 5.0
"""Promise X1: how soon the socket of a revoked agent is closed."""


def unverified_tls_context() -> ssl.SSLContext:
    """Return a TLS context that checks no certificate; only the real agent compares it with the pinned fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def is_up(product: Product, token: str, host: str) -> bool:
    """Tell whether the API shows the agent of `host` as up."""
    agents = product.json("/api/agents/", token).get("results", ())
    return any((one["host"]["name"], one["state"]) == (host, "up") for one in agents)


def test_an_agent_joins_over_the_tls_listener_and_is_disconnected_when_revoked(product: Product) -> None:
    name = f"cmp-{uuid.uuid4().hex[:8]}"
    port = int(product.wait_for_log(r"agents: https://127\.0\.0\.1:(\d+) \(certificate sha256:[0-9a-f]{64}\)")[1])
    assert stat.S_IMODE((product.state / "agent-tls.pem").stat().st_mode) == 0o600
    join = credentials.parse_join_string(
        product.manage("join_token", name, "--address", f"https://127.0.0.1:{port}")[-1]
    )
    assert join.fingerprint in product.log()
    reader = product.manage("api_token", f"reader-{name}")[-1]
    browser = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=unverified_tls_context())
    browser.request("GET", "/admin/")
    assert browser.getresponse().status == 404
    browser.close()

    agent = WireAgent(port, name, token=join.secret, tls=unverified_tls_context(), fingerprint=join.fingerprint)
    with agent.connect_and_say_hello() as socket:
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        # The API is asked and no management command, which can take longer than the 24 s that one heartbeat is valid.
        product.until(lambda: is_up(product, reader, name), 20, "its agent is up")
        product.manage("revoke_agent", name, "--reason", "stolen")
        refusal = wire.decode_from_gateway(socket.recv(timeout=CLOSED_S))
        assert isinstance(refusal, wire.Refuse) and refusal.code == "revoked"
        assert is_closed(socket)
    agent.token = ""
    assert agent.connect_refused() == (403, "revoked")
    assert agent_states(product)[name] == "revoked"

    again = WireAgent(
        port,
        name,
        key=Ed25519PrivateKey.generate(),
        token=credentials.parse_join_string(product.manage("join_token", name, "--address", "https://x")[-1]).secret,
        tls=unverified_tls_context(),
        fingerprint=join.fingerprint,
    )
    with again.connect_and_say_hello() as socket:
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
