"""The agents' own TLS listener and revocation in the product as it is started: pinned, joined, thrown out."""

from __future__ import annotations

import http.client
import json
import ssl
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agents import credentials, wire
from tests.support.wireagent import WireAgent, ask, is_closed
from tests.system.product import Product, running
from tests.system.test_refusals import refusal

pytestmark = pytest.mark.system

CLOSED_S = 5.0
"""Promise X1: so soon a revoked agent's socket is closed."""


def seeing_anything() -> ssl.SSLContext:
    """The pin is looked at by the real agent; here the certificate is read from the connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_agents_have_a_listener_of_their_own_and_lose_it_when_revoked(folder: Path) -> None:
    product = Product(folder / "state", {"CYBORG_AGENT_LISTEN": "127.0.0.1:0"})
    with running(product):
        port = int(product.until_said(r"agents: https://127\.0\.0\.1:(\d+) \(certificate sha256:[0-9a-f]{64}\)")[1])
        assert stat.S_IMODE((product.state / "agent-tls.pem").stat().st_mode) == 0o600
        join = credentials.parse_join_string(
            product.manage("join_token", "cmp7", "--address", f"https://127.0.0.1:{port}")[-1]
        )
        assert join.fingerprint in product.log()
        browser = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=seeing_anything())
        browser.request("GET", "/admin/")
        assert browser.getresponse().status == 404
        browser.close()

        agent = WireAgent(port, "cmp7", token=join.secret, tls=seeing_anything(), fingerprint=join.fingerprint)
        with agent.speaking() as socket:
            assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
            product.until(lambda: states(product).get("cmp7") == "up", 20, "cmp7 is not up")
            product.manage("revoke_agent", "cmp7", "--reason", "stolen")
            refusal = wire.decode_from_gateway(socket.recv(timeout=CLOSED_S))
            assert isinstance(refusal, wire.Refuse) and refusal.code == "revoked"
            assert is_closed(socket)
        agent.token = ""
        assert agent.refused() == (403, "revoked")
        assert states(product)["cmp7"] == "revoked"

        again = WireAgent(
            port,
            "cmp7",
            key=Ed25519PrivateKey.generate(),
            token=credentials.parse_join_string(
                product.manage("join_token", "cmp7", "--address", "https://x")[-1]
            ).secret,
            tls=seeing_anything(),
            fingerprint=join.fingerprint,
        )
        with again.speaking() as socket:
            assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")


def test_this_machines_agent_gets_a_new_key_and_a_revoked_one_stays_out_after_a_restart(folder: Path) -> None:
    product = Product(folder / "state")
    with running(product):
        product.until(lambda: "up" in states(product).values(), 30, "the local agent is not up")
        (host,) = states(product)
        before = (product.state / "agent" / "identity.key").read_text()
        product.manage("agents", "--rotate", host)
        product.until(lambda: (product.state / "agent" / "identity.key").read_text() != before, 20, "no new key")
        product.until(
            lambda: product.rows("SELECT 1 FROM accelerators_event WHERE action = 'agent.rotated'"), 10, "no event"
        )
        product.manage("revoke_agent", host)
        product.until_said("revoked", 20)
        product.interrupt()
        product.start()
        product.until_said(r"refused \(403\).*was revoked", 30)
        assert states(product) == {host: "revoked"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("CYBORG_AGENT_CERT", "/nowhere/cert.pem"),
        ("CYBORG_AGENT_KEY", "/nowhere/key.pem"),
        ("CYBORG_AGENT_LISTEN", "x"),
    ],
)
def test_a_listener_that_cannot_be_is_refused_at_the_start(folder: Path, setting: str, value: str) -> None:
    said = refusal(Product(folder / "state", {"CYBORG_AGENT_LISTEN": "127.0.0.1:0"} | {setting: value}))
    assert setting in said or value in said


def states(product: Product) -> dict[str, str]:
    """Host → state, as `manage.py agents` tells it."""
    return {one["host"]: one["state"] for one in json.loads("\n".join(product.manage("agents", "--json")))}
