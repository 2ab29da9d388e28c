"""Tests that the gateway's writer does not wait for rows that another transaction has locked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.db import connection
from psycopg.errors import LockNotAvailable
from websockets.sync.client import ClientConnection

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain.caller import Caller
from accelerators.models import Command, Host, Tick
from agents import key_revocation, wire
from agents.gateway import command_dispatch
from agents.gateway.asgi_app import AgentGateway
from agents.gateway.leases import LeaseBuffer
from agents.gateway.row_locks import MAX_LOCK_TIMEOUTS, limiting_lock_waits, write_unless_locked
from agents.models import Agent, Gateway, Lease, Spooled
from tests.agents.test_key_revocation import receive_message, sign_new_key
from tests.support.reports import make_card, make_driver_report
from tests.support.webserver import until
from tests.support.wireagent import OPS, WireAgent, ask, make_join_secret, receive_command, send_result

pytestmark = pytest.mark.django_db(transaction=True)
ADMIN_CALLER = Caller("olga", "u", frozenset({"admin"}), "p1")
OF_CMP1 = "host_id = (SELECT id FROM accelerators_host WHERE name = 'cmp1') FOR UPDATE"
LOCK_HOST = "SELECT 1 FROM accelerators_host WHERE name = 'cmp1' FOR UPDATE"
LOCK_AGENT = f"SELECT 1 FROM agents_agent WHERE {OF_CMP1}"
LOCK_LEASE = f"SELECT 1 FROM agents_lease WHERE {OF_CMP1}"
LOCK_COMMAND = f"SELECT 1 FROM accelerators_command WHERE {OF_CMP1}"
LOCK_TOKENS = "SELECT 1 FROM agents_jointoken FOR UPDATE"
LOCK_GATEWAYS = "SELECT 1 FROM agents_gateway FOR UPDATE"
INSERT_SAME_HOST = """
INSERT INTO accelerators_host SELECT (jsonb_populate_record(h,
  jsonb_build_object('id', h.id + 1000, 'uuid', gen_random_uuid(), 'name', 'cmp3', 'node', 'cmp3'))).*
FROM accelerators_host h WHERE name = 'cmp1'
"""
INSERT_SAME_TICK = "INSERT INTO tick (name) VALUES ('merge')"


@dataclass
class Story:
    """A gateway to which the agent of cmp1 is connected by `socket`, and threads in which agents can connect."""

    gateway: AgentGateway
    agent: WireAgent
    socket: ClientConnection
    threads: ThreadPoolExecutor

    def send(self, message: wire.Message) -> None:
        """Send a message of cmp1."""
        self.socket.send(wire.encode_message(message))

    def has_held_work(self) -> bool:
        """Return whether the writer keeps something that needs a locked row."""
        writer = self.gateway._writer
        return bool(
            self.gateway._report_writer._held_jobs
            or writer._held_jobs
            or writer._leases._locked_hosts
            or "merge" in writer._jobs_to_wake
        )


@contextmanager
def holding(statement: str) -> Iterator[None]:
    """Execute a statement in a transaction of another connection, which is rolled back at the end of the block."""
    with psycopg.connect(**connection.get_connection_params()) as outside:
        assert outside.execute(statement).rowcount > 0, "nothing is held"
        yield
        outside.rollback()


def make_report(*devices: object, seq: int = 1) -> wire.Report:
    drivers = (make_driver_report(*devices),)  # type: ignore[arg-type]
    return wire.Report(1, seq, wire.hash_report_content(drivers), drivers)


def get_lease(host: str) -> datetime:
    return Lease.objects.get(host__name=host).seen_at


Scene = Iterator[Callable[[], object] | None]
"""A scene prepares its rows, yields, then has something written that the test holds, and yields a function that returns
whether it is written."""


def come_back_with_another_node(story: Story) -> Scene:
    yield None
    story.socket.close()
    story.threads.submit(replace(story.agent, node="renamed").connect)
    yield lambda: Host.objects.filter(name="cmp1", node="renamed").exists()


def join_as_a_new_host(story: Story) -> Scene:
    newcomer = WireAgent(story.agent.port, host="cmp3", token=make_join_secret("cmp3"))
    yield None
    story.threads.submit(newcomer.connect)
    yield lambda: Agent.objects.filter(host__name="cmp3").exists()


def join_with_another_key(story: Story) -> Scene:
    newcomer = WireAgent(story.agent.port, token=make_join_secret("cmp1"))
    yield None
    story.threads.submit(newcomer.connect)
    yield lambda: Agent.objects.filter(public_key=newcomer.public_key).exists()


def say_hello_again(story: Story) -> Scene:
    yield None
    story.send(wire.Hello("9.10", "boot-1", (), OPS))
    yield lambda: Agent.objects.filter(host__name="cmp1", version="9.10").exists()


def send_a_new_key(story: Story) -> Scene:
    key_revocation.request_key_rotation(key_revocation.find_agent("cmp1"), "olga")
    receive_message(story.socket, wire.Rotate)
    key = Ed25519PrivateKey.generate()
    yield None
    story.send(sign_new_key(story.agent, key))
    yield lambda: Agent.objects.filter(public_key=replace(story.agent, key=key).public_key).exists()


def be_barred_as_a_clone(story: Story) -> Scene:
    identity = key_revocation.ConnectionIdentity("192.0.2.1", "boot-2", 1)
    yield None
    host_id, loop = Host.objects.get(name="cmp1").id, story.gateway._writer._loop
    assert loop
    loop.call_soon_threadsafe(story.gateway._bar_clone, host_id, story.agent.public_key, identity, identity)
    yield lambda: Agent.objects.filter(host__name="cmp1", barred="clone").exists()


def send_a_heartbeat(story: Story) -> Scene:
    until(lambda: Lease.objects.filter(host__name="cmp1").exists())
    before = get_lease("cmp1")
    yield None
    story.send(wire.Beat(9))
    yield lambda: get_lease("cmp1") > before


def send_a_heartbeat_to_a_gateway_that_forgets_another(story: Story) -> Scene:
    story.gateway.set_public_url("http://own")
    for url in ("http://own", "http://gone"):
        Gateway.objects.create(url=url, name="x", seen_at=datetime.now(UTC) - timedelta(hours=2))
    return send_a_heartbeat(story)


def confirm_a_command(story: Story) -> Scene:
    order = command_queue.order_host_command("logs", Host.objects.get(name="cmp1").uuid, ADMIN_CALLER)
    receive_command(story.socket)
    yield None
    story.send(wire.Taken((order.id,)))
    yield lambda: Command.objects.filter(id=order.id, state="taken").exists()


def answer_a_command(story: Story) -> Scene:
    order = command_queue.order_host_command("logs", Host.objects.get(name="cmp1").uuid, ADMIN_CALLER)
    command = receive_command(story.socket)
    yield None
    send_result(story.socket, command)
    yield lambda: Command.objects.filter(id=order.id, outcome="succeeded").exists()


def send_a_report(story: Story) -> Scene:
    yield None
    assert ask(story.socket, make_report(make_card(1))) == wire.Ack(1, "Report")
    yield lambda: Tick.objects.filter(name="merge").exists()


@pytest.mark.parametrize(
    ("held", "play"),
    [
        (LOCK_HOST, come_back_with_another_node),
        (LOCK_HOST, join_with_another_key),
        (LOCK_TOKENS, join_with_another_key),
        (LOCK_AGENT, join_with_another_key),
        (INSERT_SAME_HOST, join_as_a_new_host),
        (LOCK_AGENT, say_hello_again),
        (LOCK_AGENT, send_a_new_key),
        (LOCK_TOKENS, be_barred_as_a_clone),
        (LOCK_LEASE, send_a_heartbeat),
        (LOCK_GATEWAYS, send_a_heartbeat_to_a_gateway_that_forgets_another),
        (LOCK_COMMAND, confirm_a_command),
        (LOCK_COMMAND, answer_a_command),
        (INSERT_SAME_TICK, send_a_report),
    ],
)
def test_a_locked_row_of_one_host_delays_no_acknowledgement_of_another(
    agent: WireAgent, gateway: AgentGateway, held: str, play: Callable[[Story], Scene]
) -> None:
    other = WireAgent(agent.port, host="cmp2", token=make_join_secret("cmp2"))
    with ThreadPoolExecutor(1) as threads, agent.connect_and_say_hello(OPS) as socket, other.connect() as beside:
        until(lambda: Lease.objects.count() == 2 and Agent.objects.filter(version="9.9").exists())
        story = Story(gateway, agent, socket, threads)
        scene = play(story)
        next(scene)
        with holding(held):
            is_written = next(scene)
            assert is_written
            until(lambda: story.has_held_work() or is_written(), 2)
            renewed_at, began = get_lease("cmp2"), time.monotonic()
            assert ask(beside, make_report(make_card(2))) == wire.Ack(1, "Report")
            assert time.monotonic() - began < 1.0
            assert Spooled.objects.filter(host__name="cmp2").count() == 1
            ask(beside, wire.Beat(1))
            until(lambda: get_lease("cmp2") > renewed_at, 2)
        until(is_written, 5)
        until(lambda: not story.has_held_work())


@pytest.mark.parametrize("mode", ["SHARE", "ACCESS EXCLUSIVE"])
def test_while_the_spool_is_locked_leases_are_renewed_and_no_report_is_lost(
    agent: WireAgent, gateway: AgentGateway, mode: str
) -> None:
    other = WireAgent(agent.port, host="cmp2", token=make_join_secret("cmp2"))
    with agent.connect() as socket, other.connect() as beside:
        until(lambda: Lease.objects.count() == 2)
        with psycopg.connect(**connection.get_connection_params()) as outside:
            outside.execute(f"LOCK TABLE spool IN {mode} MODE")
            socket.send(wire.encode_message(make_report(make_card(1))))
            until(lambda: gateway._pending_bytes)
            renewed_at = get_lease("cmp2")
            ask(beside, wire.Beat(1))
            until(lambda: get_lease("cmp2") > renewed_at, 2)
        assert wire.decode_from_gateway(socket.recv(timeout=5)) == wire.Ack(1, "Report")
    assert Spooled.objects.get().host.name == "cmp1"


def test_a_locked_command_that_an_agent_cannot_accept_delays_no_command_for_another(
    agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_dispatch, "POLL_S", 0.1)
    other = WireAgent(agent.port, host="cmp2", token=make_join_secret("cmp2"))
    agent.connect().close()
    order = command_queue.order_host_command("logs", Host.objects.get(name="cmp1").uuid, ADMIN_CALLER)
    with other.connect_and_say_hello(OPS) as beside:
        with holding(LOCK_COMMAND), agent.connect_and_say_hello():
            until(lambda: Agent.objects.filter(host__name="cmp1", version="9.9").exists())
            later = command_queue.order_host_command("logs", Host.objects.get(name="cmp2").uuid, ADMIN_CALLER)
            assert receive_command(beside, 5).number == later.id
        with agent.connect_and_say_hello():
            until(lambda: Command.objects.filter(id=order.id, outcome="refused").exists())


@pytest.mark.parametrize("locked", [set(), {3}, {0, 9}, {2, 3, 4}])
def test_what_can_be_written_is_written_whichever_rows_are_locked(locked: set[int]) -> None:
    written: list[int] = []

    def write(numbers: list[int]) -> None:
        if locked.intersection(numbers):
            raise LockNotAvailable
        written.extend(numbers)

    assert write_unless_locked([*range(10)], write) == ([], sorted(locked))
    assert sorted(written) == sorted({*range(10)} - locked)


def test_after_many_lock_timeouts_the_rest_is_left_for_the_next_attempt() -> None:
    tried = []

    def write(numbers: list[int]) -> None:
        tried.append(numbers)
        raise LockNotAvailable

    unwritten = write_unless_locked([*range(500)], write)
    assert unwritten.locked == [numbers[0] for numbers in tried if len(numbers) == 1]
    assert sorted(unwritten.untried + unwritten.locked) == [*range(500)]
    assert len(tried) == MAX_LOCK_TIMEOUTS


@pytest.mark.slow
def test_the_leases_of_other_hosts_are_renewed_although_many_rows_are_locked() -> None:
    with conductor.writing():
        hosts = Host.objects.bulk_create(Host(name=f"n{n:03}", node=f"n{n:03}") for n in range(200))
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    Lease.objects.bulk_create(Lease(host=host, seen_at=long_ago, epoch=1) for host in hosts)
    leases = LeaseBuffer(0.0)
    with limiting_lock_waits():
        connection.close()
        with holding(
            "SELECT 1 FROM agents_lease JOIN accelerators_host h ON h.id = host_id AND h.name < 'n040' FOR UPDATE"
        ):
            for _ in range(10):
                for host in hosts:
                    leases.note_heartbeat(host.id, 1)
                leases.flush()
            assert Lease.objects.filter(seen_at=long_ago).count() == 40
            assert len(leases._locked_hosts) == 40
        until(lambda: leases.flush() and not leases._locked_hosts)
        assert not Lease.objects.filter(seen_at=long_ago).exists()
    connection.close()
