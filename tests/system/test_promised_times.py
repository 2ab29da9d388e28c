"""Tests of promised times of 5 s and more, each with its own limit.

The product has its default settings, except that a bind expires after 6 s (CYBORG_BIND_TIMEOUT_S) and that the handles
of the fake card are mediated devices, which the host must create.

Every measured time is printed, so that `pytest -rP` shows the headroom.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from agents import credentials, wire
from tests.support.webserver import measure_until
from tests.support.wireagent import WireAgent, ask
from tests.system.conftest import fresh_folder
from tests.system.product import Product, running

pytestmark = pytest.mark.system
SEEN_S = 30.0
"""Promise L1: how soon the silence of an agent is seen."""
CLOSED_S = 5.0
"""Promise X1: how soon the socket of a revoked agent is closed."""
GATEWAY_GONE_S = 35.0
"""docs/install-several.md: how soon an agent notices that its gateway is gone. It waits for three heartbeats of 8 s
after the first one that was not acknowledged."""
BIND_TIMEOUT_S, EXPIRED_S = 6, 10.0
"""The deadline of a bind in this file, and how soon after it the request must have failed. The job that looks for
expired binds runs every 5 s."""
HOST = "here.example"
REVOKE_SILENTLY = """
UPDATE agents_agent a SET barred = 'revoked', barred_reason = 'stolen', changed_at = now()
FROM accelerators_host h WHERE h.id = a.host_id AND h.name = %s RETURNING a.id
"""
"""Write the same columns as a revocation, but send no notification."""
SELECT_LEASES_AFTER = """
SELECT l.seen_at FROM agents_lease l JOIN accelerators_host h ON h.id = l.host_id
WHERE h.name = %s AND l.seen_at > %s::timestamptz + interval '10 s'
"""
DEVICE_STATES = "SELECT uuid, state FROM accelerators_device ORDER BY id"
STALE = "SELECT stale_since IS NOT NULL FROM accelerators_host WHERE name = %s"
CUT_LISTENERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query ILIKE 'LISTEN%%'"


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    """One product whose fake card has handles that the host must create for each bind."""
    with fresh_folder() as folder:
        (folder / "fake.json").write_text(json.dumps({"handle_type": "MDEV"}))
        (folder / "drivers.toml").write_text(f'[fake_driver]\ncontrol_file = "{folder}/fake.json"\n')
        settings = {"CYBORG_HOST_NAME": HOST, "CYBORG_HOST_NODE": "here", "CYBORG_BIND_TIMEOUT_S": str(BIND_TIMEOUT_S)}
        settings |= {"CYBORG_DRIVER_SETTINGS": str(folder / "drivers.toml")}
        with running(Product(folder / "state", settings)) as started:
            ready = "SELECT 1 FROM accelerators_device WHERE vendor = '0xABCD' AND state = 'ready'"
            started.until(lambda: started.rows(ready), 30, "the fake card is ready")
            yield started


@pytest.fixture(scope="module")
def headers(product: Product) -> dict[str, str]:
    """The headers with an administrator's token and Nova's service token."""
    admin, service = (product.manage("api_token", role, "--role", role)[-1] for role in ("admin", "service"))
    return {"X-Auth-Token": admin, "X-Service-Token": service}


@contextmanager
def stopped_process(pid: int) -> Iterator[float]:
    """Stop a process with SIGSTOP and yield the time of that; continue the process after the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.kill(pid, signal.SIGCONT)


def call_api(product: Product, headers: dict[str, str], method: str, path: str, body: Any = None) -> Any:
    """Call an API of the product and return the decoded answer, None without a body; fail if the status is an error."""
    url = f"http://127.0.0.1:{product.port}{path}"
    answer = requests.request(method, url, json=body, headers=headers, timeout=30)
    assert answer.ok, (method, path, answer.status_code, answer.text)
    return answer.json() if answer.content else None


def agents_by_host(product: Product, headers: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the agents that the API lists, by the name of their host."""
    return {one["host"]["name"]: one for one in call_api(product, headers, "GET", "/api/agents/")["results"]}


def make_joined_agent(product: Product, host: str) -> WireAgent:
    """Return an agent with a new join token for `host`."""
    secret = credentials.parse_join_string(
        product.manage("join_token", host, "--address", f"http://127.0.0.1:{product.port}")[-1]
    ).secret
    return WireAgent(product.port, host, host, token=secret)


def is_closed(socket: ClientConnection) -> bool:
    """Tell whether the gateway has closed the socket; read and drop one message if there is one."""
    try:
        socket.recv(timeout=0.02)
    except ConnectionClosed:
        return True
    except TimeoutError:
        pass
    return False


def test_L1_the_silence_of_an_agent_is_seen_within_30_s(product: Product, headers: dict[str, str]) -> None:
    """One agent is stopped, one keeps its socket open and sends nothing, and the socket of one is closed."""
    agent = product.until(lambda: product.child("agent"), 30, "the agent runs")
    names, before = (HOST, "quiet.example", "cut.example"), product.rows(DEVICE_STATES)
    with (
        make_joined_agent(product, names[1]).connect_and_say_hello() as quiet,
        make_joined_agent(product, names[2]).connect_and_say_hello() as cut,
    ):
        for socket in (quiet, cut):
            assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        product.until(
            lambda: all(agents_by_host(product, headers).get(name, {}).get("state") == "up" for name in names),
            30,
            "all are up",
        )
        for socket in (quiet, cut):
            assert ask(socket, wire.Beat(2)) == wire.Ack(2, "Beat")
        with stopped_process(agent.pid) as since:
            cut.socket.close()

            def seen() -> bool:
                shown = agents_by_host(product, headers)
                stale = call_api(product, headers, "GET", "/api/hosts/?stale=true")["results"]
                hosts = {host["name"] for host in stale if shown[host["name"]]["state"] == "down"}
                return hosts == set(names)

            measure_until(seen, SEEN_S, "three silent agents are shown as down, and their hosts as stale", since)
            assert product.rows(DEVICE_STATES) == before
    product.until(lambda: agents_by_host(product, headers)[HOST]["state"] == "up", 60, "the agent is up again")
    product.until(lambda: product.rows(STALE, HOST) == [(False,)], 30, "its host is not stale any more")
    assert product.rows(DEVICE_STATES) == before


def test_X1_revoking_closes_the_socket_within_5_s(product: Product, headers: dict[str, str]) -> None:
    name = "revoked.example"
    with make_joined_agent(product, name).connect_and_say_hello() as socket:
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        path = f"/api/agents/{agents_by_host(product, headers)[name]['uuid']}/revoke/"
        since = time.monotonic()
        call_api(product, headers, "POST", path, {"reason": "stolen"})
        measure_until(lambda: is_closed(socket), CLOSED_S, "the socket is closed", since)


def test_X1_revoking_closes_the_socket_within_5_s_when_its_notification_is_lost(product: Product) -> None:
    """Another process revokes the agent, while the gateway's LISTEN connections are terminated repeatedly."""
    name = "unheard.example"
    barred = (
        "SELECT 1 FROM agents_agent a JOIN accelerators_host h ON h.id = a.host_id WHERE h.name = %s AND barred <> ''"
    )
    with make_joined_agent(product, name).connect_and_say_hello() as socket:
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        errors: list[AssertionError] = []
        terminated: list[tuple[Any, ...]] = []

        def revoke() -> None:
            try:
                product.manage("revoke_agent", name)
            except AssertionError as error:
                errors.append(error)

        def is_barred() -> bool:
            assert not errors, errors
            assert not is_closed(socket)
            terminated.extend(product.rows(CUT_LISTENERS))
            return bool(product.rows(barred, name))

        revoking = threading.Thread(target=revoke)
        revoking.start()
        try:
            product.until(is_barred, 30, "the agent is revoked")
            measure_until(lambda: is_closed(socket), CLOSED_S, "the socket is closed although the message was lost")
        finally:
            revoking.join()
    assert not errors, errors
    assert terminated, "no connection was cut, so the message may have been heard"


def test_X1_revoking_closes_the_socket_within_5_s_when_no_notification_was_sent(product: Product) -> None:
    """The gateway receives no notification, so it finds the revocation only when it reads the table periodically."""
    name = "unannounced.example"
    with make_joined_agent(product, name).connect_and_say_hello() as socket:
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        assert len(product.rows(REVOKE_SILENTLY, name)) == 1
        measure_until(lambda: is_closed(socket), CLOSED_S, "the socket is closed although no message was sent")


def test_a_bind_fails_within_10_s_after_its_deadline(product: Product, headers: dict[str, str]) -> None:
    agent = product.until(lambda: product.child("agent"), 30, "the agent runs")
    profile = [{"name": "mdev", "groups": [{"resources:FPGA": "1"}]}]
    call_api(product, headers, "POST", "/v2/device_profiles", profile)
    ((provider,),) = product.rows(
        "SELECT p.rp_uuid::text FROM accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id"
        " WHERE d.vendor = '0xABCD'"
    )
    body = {"device_profile_name": "mdev"}
    (request,) = call_api(product, headers, "POST", "/v2/accelerator_requests", body)["arqs"]
    values = {"hostname": HOST, "device_rp_uuid": provider, "instance_uuid": str(uuid.uuid4())}
    patch = {request["uuid"]: [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]}

    def state() -> str:
        shown = call_api(product, headers, "GET", f"/v2/accelerator_requests/{request['uuid']}")
        return str(shown["state"])

    with stopped_process(agent.pid):
        deadline = time.monotonic() + BIND_TIMEOUT_S
        call_api(product, headers, "PATCH", "/v2/accelerator_requests", patch)

        def deadline_is_near() -> bool:
            assert state() == "BindStarted" or time.monotonic() > deadline
            return time.monotonic() > deadline - 1

        product.until(deadline_is_near, BIND_TIMEOUT_S, "the deadline is near")
        measure_until(lambda: state() == "BindFailed", EXPIRED_S, "the bind fails after its deadline", deadline)


def test_an_agent_notices_within_35_s_that_its_gateway_is_gone(product: Product) -> None:
    """The gateway is stopped with SIGSTOP, so that connections are neither closed nor refused."""
    web = product.until(lambda: product.child("web"), 30, "the gateway runs")
    ((begin,),) = product.rows("SELECT clock_timestamp()")
    # An agent that another test has stopped may be reconnecting: wait until its heartbeats have arrived for a while.
    product.until(lambda: product.rows(SELECT_LEASES_AFTER, HOST, begin), 90, "the agent keeps sending heartbeats")
    place = product.log_position()
    with stopped_process(web.pid) as since:
        # It names a report if it has sent one meanwhile: programs of other tests change what the host itself uses. A
        # WebSocket ping that it sent right after the stop is overdue a little earlier than its heartbeat.
        reasons = "has acknowledged nothing for|has not acknowledged report|keepalive ping timeout"
        pattern = re.compile(f"cyborg.link: .*({reasons})")
        measure_until(lambda: pattern.search(product.log(), place), GATEWAY_GONE_S, "the agent lets go", since)
    product.wait_for_log(r"agent +\|.*connected to", 60, after=place)
