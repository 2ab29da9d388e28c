"""Test a deployment by docs/deploy with two controllers, one of which is cut off and later returns.

The machines are simulated with network namespaces; the test is skipped where that is not possible.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from accelerators.runtime import jobs
from tests.support.webserver import until
from tests.system import simulated
from tests.system.deployment import ADDRESSES, AGENTS_NAME, FILES, GATEWAYS_NAME, HOSTS, NODES, Deployment
from tests.system.people import LivePage, MonitoringReader, NovaTraffic, Person, UsageStream

pytestmark = pytest.mark.system
READY_S, SOON_S = 60.0, 30.0
GATEWAY, REST, TLS = 8000, 8001, 8443
GATEWAY_ADDRESSES = ("db.example.com", "host2.example.com")
"""The machines from which agents connect: host1 through the proxy, host2 directly, by a name of both gateways."""
HOLD_MERGE_LOCK = f"""
from django.db import connection, transaction
import time
with transaction.atomic(), connection.cursor() as cursor:
    cursor.execute("SELECT pg_advisory_xact_lock({jobs.LOCK_CLASS}, {jobs.lock_id("merge")})")
    print("mine", flush=True)
    time.sleep(3600)
"""
"""A program that holds the lock of the merge job until its node is switched off, as a worker in a merge would."""
FIRST_DEVICE = """
SELECT p.rp_uuid::text, h.uuid::text, d.uuid::text, d.id::text FROM accelerators_deployable p
JOIN accelerators_device d ON d.id = p.device_id JOIN accelerators_host h ON h.id = d.host_id
WHERE h.name = 'host1.example.com' ORDER BY d.key LIMIT 1
"""


@pytest.fixture
def deployment(folder: Path) -> Iterator[Deployment]:
    """Simulated machines and a database; the product is not started yet."""
    if why := simulated.missing():
        pytest.skip(f"SKIPPED LEVEL several machines: {why}")
    made = Deployment(folder)
    try:
        yield made
    finally:
        print(made.log_ends())
        made.close()


class DeploymentStory:
    """Steps and questions that the parts of the test have in common."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.person = deployment, Person(deployment)

    def until(self, condition: Any, what: str | Callable[[], str], deadline_s: float = SOON_S) -> Any:
        """Wait for a condition and return its value; a failure names `what`, or what it returns then."""
        try:
            return until(condition, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{what() if callable(what) else what}: {error}") from None

    def start_node(self, node: str) -> None:
        """Start both units of a node, as `systemctl start` does."""
        for unit in ("accelerators", "accelerators-rest"):
            self.deployment.start_unit(node, unit)

    def until_ready(self, node: str) -> None:
        """Wait until the gateway and the REST process of a node answer /readyz with 200."""
        for at in (process_address(node, GATEWAY), process_address(node, REST)):
            self.until(lambda a=at: self.person.call("GET", "/readyz", at=a)[0] == 200, f"{node} at {at}", READY_S)

    def set_fake_cards(self, host: str, count: int, **more: Any) -> None:
        """Change the fake hardware of a compute host to `count` cards."""
        path = self.deployment.control_file(host)
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"count": count} | more))
        new.rename(path)

    def join_host(self, host: str, name: str) -> None:
        """Make a join token for gateways at `name`, and start the agent of a compute host with it."""
        address = f"https://{name}:{TLS}"
        token = self.deployment.manage("node1", "join_token", f"{host}.example.com", "--address", address)[-1]
        self.deployment.start_unit(host, "accelerators-agent", CYBORG_JOIN_TOKEN=token)

    def wait_for_devices(self, host: str, count: int, deadline_s: float = SOON_S) -> None:
        """Wait until the API shows exactly `count` devices of a host, all ready and not stale."""

        def has_these_devices() -> bool:
            found = self.person.listed(f"/api/devices/?host={host}.example.com")
            return sum(one["state"] == "ready" and not one["stale"] for one in found) == count == len(found)

        self.until(has_these_devices, f"{host} has {count} devices", deadline_s)

    def count_census_answers(self, at: tuple[str, int]) -> int:
        """Ask one process for a census; return how many hosts answered, 0 if the census failed."""
        status, said = self.person.call("POST", "/api/census/", {}, at=at)
        return int(said["came"]) if status == 200 else 0


def process_address(node: str, port: int) -> tuple[str, int]:
    """Return the address at which a process of a node listens."""
    return ADDRESSES[f"{node}.example.com"], port


def test_one_of_two_controllers_can_vanish_and_return_without_loss(deployment: Deployment) -> None:
    story = DeploymentStory(deployment)
    start_both_nodes(story)
    join_hosts(story)
    check_census_at_every_process(story)
    work = BackgroundWork(story)
    victim = next(node for node in NODES if ADDRESSES["db.example.com"] in deployment.machines[node].callers(TLS))
    (survivor,) = set(NODES) - {victim}
    disconnect_node(story, work, victim, survivor)
    reconnect_node(story, work, victim)
    check_nothing_acknowledged_is_lost(story, work, survivor)
    for unit in ("accelerators-rest", "accelerators"):
        assert deployment.stop(survivor, unit) == 0, f"{unit} did not end by itself"


class BackgroundWork:
    """Clients that work during the whole test: Nova, an operator, monitoring, a console page, a usage stream."""

    def __init__(self, story: DeploymentStory) -> None:
        profile = [{"name": "one", "groups": [{"resources:FPGA": "1"}]}]
        assert story.person.call("POST", "/v2/device_profiles", profile)[0] == 201
        ((provider, host, device, self.key),) = story.deployment.rows(FIRST_DEVICE)
        self.nova = NovaTraffic(story.person, provider, "host1.example.com", host)
        self.reader = MonitoringReader(story.person)
        self.page = LivePage(story.person, [self.key])
        self.stream = UsageStream(story.person, device)
        self.all = (self.nova, self.reader, self.page, self.stream)
        self.until_all_progress(story)

    def until_all_progress(self, story: DeploymentStory) -> None:
        """Wait until each client has received further successful answers."""
        now, read, moment = time.monotonic(), len(self.reader.statuses), datetime.now(UTC).isoformat()
        story.until(lambda: self.nova.count_since(now) > 2, lambda: f"binds and commands: {self.nova.refused[-3:]}")
        story.until(lambda: len(self.reader.statuses) > read + 4, lambda: f"reads: {self.reader.troubles[-3:]}")
        story.until(lambda: self.page.live, lambda: f"the page is live: {self.page.troubles[-3:]}")
        story.until(lambda: self.stream.newest() > moment, lambda: f"the stream: {self.stream.troubles[-3:]}")


def start_both_nodes(story: DeploymentStory) -> None:
    """Start both nodes at once, then the proxy, and check them.

    One node must make the tables and the only first login while the other waits. Neither may start its own agent, and
    the proxy must not pass on the metrics and the challenge for agents.
    """
    deployment, person = story.deployment, story.person
    for node in NODES:
        story.start_node(node)
    for node in NODES:
        story.until_ready(node)
    deployment.start_proxy()
    logins = [
        path.read_text().strip()
        for node in NODES
        if (path := deployment.state_directory(node) / "first-login").exists()
    ]
    assert len(logins) == 1
    for table in ("agents_jointoken", "accelerators_host", "accelerators_admissionrule"):
        assert deployment.rows(f"SELECT count(*) FROM {table}") == [(0,)], "an agent of the controller's own"
    story.until(lambda: person.call("GET", "/readyz")[0] == 200, "the proxy")
    person.login(*logins[0].split(" / "))
    for header, role in (("X-Auth-Token", "admin"), ("X-Service-Token", "service")):
        person.tokens[header] = deployment.manage("node1", "api_token", f"t-{role}", "--role", role)[-1]
    assert person.call("GET", "/api/hosts/")[0] == 200
    counted = "".join(read_metrics(story, node) for node in NODES)
    assert 'route="/api/hosts"' in counted, "what REST has counted, told by a gateway"
    assert person.call("GET", "/metrics")[0] == 403
    assert person.call("GET", "/ws/agent/challenge")[0] == 404


def read_metrics(story: DeploymentStory, node: str) -> str:
    """Return the metrics of a node, asked for from the node itself."""
    with story.deployment.machines[node].connect("127.0.0.1", GATEWAY) as here, here.makefile() as answer:
        here.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return answer.read()


def join_hosts(story: DeploymentStory) -> None:
    """Join host1 through the proxy and host2 directly; an admission rule makes their devices ready."""
    rule = {"name": "fake", "driver": "fake_driver", "action": "ready"}
    assert story.person.call("POST", "/api/rules/", rule)[0] == 201
    story.set_fake_cards("host1", 2, handle_type="MDEV")
    story.set_fake_cards("host2", 1)
    for host, name in zip(HOSTS, (AGENTS_NAME, GATEWAYS_NAME), strict=True):
        story.join_host(host, name)
    story.wait_for_devices("host1", 2)
    story.wait_for_devices("host2", 1)


def check_census_at_every_process(story: DeploymentStory) -> None:
    """Check that each process can ask all hosts for their load, though only one gateway is connected to each agent."""
    for at in (process_address(node, port) for node in NODES for port in (GATEWAY, REST)):
        story.until(lambda a=at: story.count_census_answers(a) == len(HOSTS), f"both hosts answer what {at} asks")


def disconnect_node(story: DeploymentStory, work: BackgroundWork, victim: str, survivor: str) -> None:
    """Cut a node off while one of its workers holds the merge lock, and check that the other node takes over.

    Its processes go on, so no connection is closed; the node is switched off only at the end.
    """
    deployment, machine = story.deployment, story.deployment.machines
    deployment.start_managed(victim, "worker", "shell", "-c", HOLD_MERGE_LOCK)
    story.until(lambda: "mine" in deployment.read_log(victim, "worker"), "the lock is held")
    machine[victim].unplug_cable()
    read = len(work.reader.statuses)
    story.set_fake_cards("host1", 3, handle_type="MDEV")
    story.set_fake_cards("host2", 2)
    come = {ADDRESSES[name] for name in GATEWAY_ADDRESSES}
    story.until(lambda: come <= machine[survivor].callers(TLS), "the agents come to the other")
    story.wait_for_devices("host1", 3, READY_S)
    story.wait_for_devices("host2", 2)
    work.until_all_progress(story)
    assert set(work.reader.statuses[read:]) == {200}
    check_page_follows_decision(story, work)
    machine[victim].power_off()


def check_page_follows_decision(story: DeploymentStory, work: BackgroundWork) -> None:
    """Check that an open page shows an operator's decision, whichever gateway serves it now."""
    device, before = work.stream.device, dict(work.page.cells[work.key])

    def decide(verb: str) -> bool:
        """Perform an action on the device, with the token of its preview while a request holds the device."""
        path, body = f"/api/devices/{device}/{verb}/", {"reason": "a test"}
        status, answer = story.person.call("POST", path, body)
        if status == 409 and "preview" in answer:
            status, answer = story.person.call("POST", path, body | {"token": answer["preview"]["token"]})
        return status == 200

    story.until(lambda: decide("disable"), "the device is disabled")
    story.until(lambda: work.page.cells[work.key] != before and work.page.live, "the page shows it")
    story.until(lambda: decide("enable"), "the device is enabled")


def reconnect_node(story: DeploymentStory, work: BackgroundWork, victim: str) -> None:
    """Switch the node on again; the proxy must send it requests, and each process must know the load of all hosts."""
    story.deployment.machines[victim].power_on()
    story.start_node(victim)
    story.until_ready(victim)
    at = process_address(victim, REST)
    seen = story.deployment.count_served(*at)
    story.until(lambda: story.deployment.count_served(*at) > seen, "the proxy sends it callers again")
    check_census_at_every_process(story)
    work.until_all_progress(story)


def check_nothing_acknowledged_is_lost(story: DeploymentStory, work: BackgroundWork, node: str) -> None:
    """Check that each acknowledged request and command is stored and has ended, and that the events verify."""
    for one in work.all:
        one.end()
    deployment, nova = story.deployment, work.nova
    left = deployment.first_column("SELECT uuid FROM accelerators_acceleratorrequest")
    assert nova.made.keys() - nova.tried <= left
    assert not nova.deleted.keys() & left
    assert nova.made.keys() <= deployment.first_column(
        "SELECT subject FROM accelerators_event WHERE action = 'request.created'"
    )
    ended = "SELECT uuid FROM accelerators_command WHERE ended_at IS NOT NULL"
    story.until(lambda: nova.ordered.keys() <= deployment.first_column(ended), "each command has ended")
    begun = "SELECT uuid FROM accelerators_acceleratorrequest WHERE state = 'BindStarted'"
    story.until(lambda: not deployment.first_column(begun), "each bind has ended", READY_S)
    story.wait_for_devices("host1", 3)
    story.wait_for_devices("host2", 2)
    story.until(lambda: deployment.rows("SELECT count(*) FROM spool") == [(0,)], "all reports are merged")
    deployment.manage(node, "verify_events")


def test_systemd_accepts_the_shipped_units(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd here")
    for path in sorted((FILES / "systemd").iterdir()):
        copy = tmp_path / path.name
        copy.write_text(path.read_text().replace("/opt/accelerators/.venv/bin/python", sys.executable))
        told = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False
        )
        assert (told.returncode, told.stderr) == (0, "")
