"""Test what `cyborg-agent check` learns from the real gateway behind the product's own web server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import authentication
from agents.gateway.asgi_app import AgentGateway
from agents.host.checking import checks, gathering
from agents.host.connection.http import GatewayEndpoint
from agents.models import Agent, JoinToken
from cyborgweb import asgi
from cyborgweb.settings.keys import Keys
from tests.support.environment import without_settings
from tests.support.webserver import serving

pytestmark = pytest.mark.django_db(transaction=True)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def address() -> Iterator[str]:
    """Return the address of a web server with a gateway."""
    gateway = AgentGateway(Keys())
    with serving(asgi.HttpApplication(gateway, None)) as port:  # type: ignore[arg-type]
        yield f"http://127.0.0.1:{port}"
    gateway.stop()


def test_the_gateway_answers_a_check_with_a_date_that_bounds_the_difference_of_the_clocks(address: str) -> None:
    conductor = asyncio.run(gathering.gather_conductor(GatewayEndpoint(address, "")))
    assert (conductor.problem, conductor.reason, conductor.ip_address) == ("", "", "127.0.0.1")
    offset = checks.bound_clock_offset(conductor.date, conductor.before, conductor.after)
    assert offset is not None and offset[0] <= 0 <= offset[1]


@pytest.mark.system
def test_a_check_uses_up_no_join_token_and_joins_nothing(address: str, tmp_path: Path) -> None:
    token = authentication.create_join_token("cmp1.example", address=address, hours=1, created_by="olga")
    keys = {"CYBORG_JOIN_TOKEN": token, "CYBORG_AGENT_STATE_DIR": str(tmp_path / "state"), "CYBORG_HOST_NODE": "cmp1"}
    command = [sys.executable, "-m", "agents.host.main", "check"]
    done = subprocess.run(
        command, cwd=ROOT, env=without_settings(**keys), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ok route {address} (127.0.0.1) answers" in " ".join(done.stdout.split())  # the columns are of any width
    assert not Agent.objects.exists() and JoinToken.objects.get().used_at is None
    assert not (tmp_path / "state").exists()
