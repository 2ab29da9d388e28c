"""Test that the local agent rotates its key and stays revoked, and that an unusable agent listener stops the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.product import Product, running
from tests.system.test_refusals import start_and_get_refusal

pytestmark = pytest.mark.system


def test_the_local_agent_rotates_its_key_and_stays_revoked_after_a_restart(folder: Path) -> None:
    product = Product(folder / "state")
    with running(product):
        product.until(lambda: "up" in agent_states(product).values(), 30, "the local agent is not up")
        (host,) = agent_states(product)
        before = (product.state / "agent" / "identity.key").read_text()
        product.manage("agents", "--rotate", host)
        product.until(lambda: (product.state / "agent" / "identity.key").read_text() != before, 20, "no new key")
        product.until(
            lambda: product.rows("SELECT 1 FROM accelerators_event WHERE action = 'agent.rotated'"), 10, "no event"
        )
        product.manage("revoke_agent", host)
        product.wait_for_log("revoked", 20)
        product.interrupt()
        product.start()
        product.wait_for_log(r"refused \(403\).*was revoked", 30)
        assert agent_states(product) == {host: "revoked"}


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("CYBORG_AGENT_CERT", "/nowhere/cert.pem", "/nowhere/cert.pem cannot be used for TLS"),
        ("CYBORG_AGENT_KEY", "/nowhere/key.pem", "CYBORG_AGENT_KEY is set without CYBORG_AGENT_CERT"),
        ("CYBORG_AGENT_LISTEN", "x", "CYBORG_AGENT_LISTEN='x' is not usable"),
    ],
)
def test_an_unusable_agent_listener_is_refused_at_the_start(folder: Path, setting: str, value: str, says: str) -> None:
    said = start_and_get_refusal(Product(folder / "state", {"CYBORG_AGENT_LISTEN": "127.0.0.1:0"} | {setting: value}))
    assert says in said


def agent_states(product: Product) -> dict[str, str]:
    """Return the state of each agent by host name, from `manage.py agents`."""
    return {one["host"]: one["state"] for one in json.loads("\n".join(product.manage("agents", "--json")))}
