"""Test promise L3: while the database, Keystone, Placement or Nova is slow or silent, reads and reports go on, and
writes are applied once the service answers again.

The promise is for an hour. Here each service is slow, and then silent, for some seconds, with the product's own
time-outs (2 to 10 s); the long version takes an hour for each.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborgweb.database.postgres import Postgres
from cyborgweb.settings.keys import Keys
from tests.support.long import scaled
from tests.support.nova import FakeNova, running_nova
from tests.system.clients.cloud import HANDLES, KeystoneCloud
from tests.system.conftest import fresh_folder
from tests.system.idle_transactions import watch_for_idle_transactions
from tests.system.keystone import Keystone
from tests.system.load import Load
from tests.system.machine import run_fake_command
from tests.system.placement import Placement
from tests.system.product import Product, running
from tests.system.slow_proxy import SlowProxy, http_proxy, postgres_proxy

pytestmark = pytest.mark.system
SLOW_DATABASE_S = scaled(15.0, 3600.0)
DATABASE_DELAY_S = 0.1
"""The delay of each answer of the database. A read needs about five answers."""
DATABASE_ANSWER_S = 15.0
"""How long any call of the v2 API may take while the database is slow: a bind needs about fifty answers."""
ACKNOWLEDGED_S = 6.0
"""How long a host that reports without pause may wait for an acknowledgement while the database is slow. Every few
seconds the gateway's writer does periodic work first, which needs about twenty answers."""
AWAY_S = scaled(5.0, 3600.0)
PHASE_S = scaled(6.0, 3600.0)
ROUND_PAUSE_S = scaled(0.0, 2.0)
"""Pause between two rounds of plugging and reading, so that outages of an hour can run side by side on one machine."""
SERVICE_DELAY_S = 4.0
"""Longer than the product waits for Nova when it shows an instance (NOVA_WAIT_S), shorter than its other time-outs (5
to 10 s). A read by a known caller may not take as long, because it needs no answer of the slow service."""
REPORT_S = 10.0
"""How soon a change of the hardware is stored, whichever service is slow. The agent rescans every 2 s."""
READ_S = 30.0
STRANGERS = 2 * Keys().request_threads
"""How many callers at once bring tokens that the product must first validate with Keystone."""
NOVA_WAIT_S = 2.0
READ_BEHIND_STRANGERS_S = 2 * SERVICE_DELAY_S + NOVA_WAIT_S + 5.0
"""How long a read by a known caller may take while Keystone is slow: callers with new tokens occupy all request threads
twice in turn until Keystone has answered; then the product waits for Nova, for whose token it asks Keystone, too. The
rest is for a busy machine."""
FAKE_CARD_STATE = "SELECT d.state FROM accelerators_device d WHERE d.vendor = '0xABCD'"
CREATED_REQUESTS = "SELECT subject FROM accelerators_event WHERE action = 'request.created'"
SETTINGS = {"CYBORG_RESCAN_S": "2", "CYBORG_HOST_NAME": "here.example", "CYBORG_HOST_NODE": "here"}


@dataclass
class SlowDatabase:
    """A product whose separate PostgreSQL is behind a proxy; the test's own queries do not go through the proxy."""

    product: Product
    postgres: Postgres
    proxy: SlowProxy


@pytest.fixture
def database(folder: Path) -> Iterator[SlowDatabase]:
    """A product with a slow database, whose fake card is ready."""
    postgres = Postgres(folder / "database", os.environ.get("CYBORG_PG_BIN", ""), durable=False)
    try:
        postgres.start()
        postgres.ensure_database("cyborg")
        with postgres_proxy(postgres.socket, folder / "slow") as proxy:
            url = f"postgresql://postgres@/cyborg?host={folder}/slow"
            settings = SETTINGS | {"CYBORG_DATABASE_URL": url}
            with running(Product(folder / "state", settings, database=postgres.socket)) as product:
                product.until(lambda: ("ready",) in product.rows(FAKE_CARD_STATE), 30, "the fake card is ready")
                yield SlowDatabase(product, postgres, proxy)
    finally:
        postgres.stop()


def test_L3_reads_reports_and_binds_are_delayed_and_not_lost_while_the_database_is_slow(database: SlowDatabase) -> None:
    product, proxy = database.product, database.proxy
    load, user = Load(product), TenantClient(product)
    with load.reporting():
        load.until_acknowledged(5)
        begin = time.monotonic()
        proxy.delay_s, user.longest_s = DATABASE_DELAY_S, 0.0
        while time.monotonic() < begin + SLOW_DATABASE_S:
            user.read()
            user.bind_and_delete_the_former()
        waits = {host.name: host.longest_wait(begin, time.monotonic()) for host in load.hosts}
        states = product.rows("SELECT name FROM accelerators_host WHERE stale_since IS NOT NULL")
        proxy.delay_s = 0.0
        load.hold()
    print(f"{proxy.delayed} answers delayed; acknowledgements took {waits}, calls {user.longest_s:.1f} s at most")
    assert proxy.delayed > 100
    assert max(waits.values()) < ACKNOWLEDGED_S, f"reports stopped: {waits}"
    assert user.longest_s < DATABASE_ANSWER_S
    assert not states, f"hosts that report are taken for silent: {states}"
    load.until_stored()
    kept = {str(uuid) for (uuid,) in product.rows("SELECT uuid FROM accelerators_acceleratorrequest")}
    assert kept == {user.bound[-1]}
    assert set(user.bound) <= {str(subject) for (subject,) in product.rows(CREATED_REQUESTS)}
    assert product.rows("SELECT state FROM accelerators_acceleratorrequest") == [("Bound",)]


def test_L3_nothing_is_lost_when_the_database_is_restarted_and_requests_get_503_meanwhile(
    database: SlowDatabase,
) -> None:
    """A bind before the restart is kept; reads during it are answered with 503 at once."""
    product, load, user = database.product, Load(database.product), TenantClient(database.product)
    user.bind_and_delete_the_former()
    with load.reporting():
        load.until_acknowledged(5)
        database.postgres.stop()
        begin = time.monotonic()
        user.ask(503, "GET", "/devices")
        assert product.get("/api/devices/", X_Auth_Token=user.headers["X-Auth-Token"])[0] == 503
        assert product.get("/healthz")[0] == 200
        product.until(lambda: time.monotonic() > begin + AWAY_S, AWAY_S, "the time of the outage is over")
        database.postgres.start()
        product.until(lambda: product.json("/v2/devices", user.headers["X-Auth-Token"]), 30, "reads are answered")
        user.bind_and_delete_the_former()
        load.until_acknowledged(5)
        load.hold()
    load.until_stored()
    assert product.rows("SELECT uuid::text FROM accelerators_acceleratorrequest") == [(user.bound[-1],)]


@dataclass
class TenantClient:
    """An administrator with Nova's service token, who reads, and who makes, binds and deletes requests."""

    product: Product
    bound: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def __post_init__(self) -> None:
        tokens = {role: self.product.manage("api_token", f"t-{role}", "--role", role)[-1] for role in ROLES}
        self.headers = {"X-Auth-Token": tokens["admin"], "X-Service-Token": tokens["service"]}
        self.ask(201, "POST", "/device_profiles", [{"name": "one", "groups": [{"resources:FPGA": "1"}]}])
        self.deployable = "SELECT rp_uuid::text FROM accelerators_deployable WHERE name LIKE '%%FakeDevice'"
        (device,) = [one for one in self.ask(200, "GET", "/devices")["devices"] if one["vendor"] == "0xABCD"]
        assert device["hostname"] == SETTINGS["CYBORG_HOST_NAME"]

    def ask(self, wanted: int, method: str, path: str, body: Any = None) -> Any:
        """Call the v2 API and return the decoded answer, which must have the wanted status."""
        begin, url = time.monotonic(), f"http://127.0.0.1:{self.product.port}/v2{path}"
        answer = requests.request(method, url, json=body, headers=self.headers, timeout=READ_S)
        self.longest_s = max(self.longest_s, time.monotonic() - begin)
        assert answer.status_code == wanted, (method, path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def read(self) -> None:
        """Read two lists."""
        self.ask(200, "GET", "/devices")
        self.ask(200, "GET", "/accelerator_requests")

    def bind_and_delete_the_former(self) -> None:
        """Bind a new request to a new instance and delete the one before."""
        ((provider,),) = self.product.rows(self.deployable)
        (request,) = self.ask(201, "POST", "/accelerator_requests", {"device_profile_name": "one"})["arqs"]
        values = {"hostname": "here.example", "device_rp_uuid": provider, "instance_uuid": str(uuid.uuid4())}
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
        self.ask(202, "PATCH", "/accelerator_requests", {request["uuid"]: patch})
        if self.bound:
            self.ask(204, "DELETE", f"/accelerator_requests?arqs={self.bound[-1]}")
        self.bound.append(request["uuid"])


ROLES = ("admin", "service")


INTENTS = {"placement": "provider", "nova": "notice"}
"""The kind of intent in which the writes to a service wait."""


@dataclass
class ProxiedSite:
    """A product whose Keystone, Placement and Nova are each behind a proxy, and its longest measured times."""

    cloud: KeystoneCloud
    placement: Placement
    nova: FakeNova
    proxies: dict[str, SlowProxy]
    root: str
    device: str
    longest_s: float = 0.0
    longest_report_s: float = 0.0

    def read(self) -> None:
        """Read with tokens that the product has cached, also the list for which it asks Nova about instances."""
        pages = [f"{self.cloud.endpoint}/devices", f"{self.cloud.endpoint}/accelerator_requests"]
        for user in ("admin", "member"):
            for page in (*pages, f"{self.cloud.url}/api/accelerators/"):
                begin = time.monotonic()
                answer = requests.get(page, headers={"X-Auth-Token": self.cloud.token(user)}, timeout=READ_S)
                assert answer.status_code == 200, answer.text
                self.longest_s = max(self.longest_s, time.monotonic() - begin)

    def read_with_new_token(self) -> int:
        """Read with a token that must first be validated with Keystone; return the status."""
        headers = {"X-Auth-Token": self.cloud.keystone.token("reader")}
        return requests.get(f"{self.cloud.endpoint}/devices", headers=headers, timeout=2 * READ_S).status_code

    def bind(self) -> str:
        """Bind a new request as Nova does; return the uuid of the request."""
        instance = str(uuid.uuid4())
        self.nova.known[instance] = 200
        (request,) = self.cloud.create_requests("fpga")
        patch = {request["uuid"]: self.cloud.bind_operations(instance)}
        answer = self.cloud.http("member", "PATCH", "/accelerator_requests", patch, service=True)
        assert answer.status_code == 202, answer.text
        return str(request["uuid"])

    def set_card(self, word: str) -> None:
        """Enable or disable the card: `word` is the action."""
        answer = self.cloud.http("admin", "POST", f"/devices/{self.device}/{word}")
        assert answer.status_code == 204, answer.text

    def reserved_units(self) -> int:
        """Return how many units of the card are reserved in Placement."""
        (provider,) = self.placement.tree(self.root).values()
        return int(provider["inventories"]["FPGA"]["reserved"])

    def waiting_intents(self) -> list[tuple[Any, ...]]:
        """Return kind, attempts and last error of the intents for Placement and Nova that are not done."""
        kinds = ", ".join(f"'{kind}'" for kind in INTENTS.values())
        return self.cloud.product.rows(
            f"SELECT kind, attempts, last_error FROM accelerators_intent WHERE kind IN ({kinds})"
        )

    def has_given_up_once(self, service: str) -> bool:
        """Tell whether an intent for `service` is waiting after a failed call."""
        return any(error for kind, _, error in self.waiting_intents() if kind == INTENTS[service])

    def plug_card(self, word: str, state: str) -> None:
        """Plug or unplug the card (`word`), and wait until the reported state is stored; record the time this takes."""
        product, begin = self.cloud.product, time.monotonic()
        run_fake_command(product, word, "0")
        product.until(lambda: product.rows(FAKE_CARD_STATE) == [(state,)], 20, f"a report that the card is {state}")
        self.longest_report_s = max(self.longest_report_s, time.monotonic() - begin)

    def make_services_fast(self) -> None:
        """Let all proxies pass on answers at once."""
        for proxy in self.proxies.values():
            proxy.delay_s, proxy.silent = 0.0, False

    def restore(self) -> None:
        """Restore the initial state: fast services, the card plugged in and enabled, no intent left."""
        self.make_services_fast()
        product = self.cloud.product
        run_fake_command(product, "plug", "0")
        there = [("ready",)], [("maintenance",)]
        product.until(
            lambda: product.rows(FAKE_CARD_STATE) in there,
            30,
            lambda: f"the card is back: {product.rows(FAKE_CARD_STATE)}",
        )
        if product.rows(FAKE_CARD_STATE) == [("maintenance",)]:
            self.set_card("enable")
        product.until(
            lambda: not self.waiting_intents() and self.reserved_units() == 0,
            90,
            lambda: f"left: {self.waiting_intents()}",
        )


@pytest.fixture(scope="module")
def whole_site(keystone: Keystone, placement: Placement) -> Iterator[ProxiedSite]:
    """One product for all tests of services, with its card enabled and Placement up to date."""
    host = f"cmp-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        folder, nova = stack.enter_context(fresh_folder()), stack.enter_context(running_nova())
        targets = {"keystone": keystone.url, "placement": placement.url, "nova": nova.url}
        proxies = {name: stack.enter_context(http_proxy(url)) for name, url in targets.items()}
        settings = keystone.environment("service") | {"OS_AUTH_URL": proxies["keystone"].url, "CYBORG_AUTH": "keystone"}
        settings |= {"CYBORG_PLACEMENT_ENDPOINT": proxies["placement"].url, "CYBORG_RESCAN_S": "2"}
        settings |= {"CYBORG_NOVA_ENDPOINT": proxies["nova"].url, "CYBORG_ENABLED_DRIVERS": "fake_driver"}
        settings |= {"CYBORG_HOST_NAME": host, "CYBORG_HOST_NODE": host}
        product = stack.enter_context(running(Product(folder / "state", settings)))
        root, cloud = placement.create_compute_provider(host), KeystoneCloud(product, keystone).enable_card()
        cloud.create_profile("fpga")
        ((device,),) = product.rows("SELECT uuid::text FROM accelerators_device")
        one = ProxiedSite(cloud, placement, nova, proxies, root, device)
        for user in ("admin", "member", "service"):
            cloud.token(user)
        one.bind()  # now the product has cached each token
        product.until(
            lambda: not one.waiting_intents() and one.reserved_units() == 0, 60, "Placement and Nova know all"
        )
        yield one


@pytest.fixture
def site(whole_site: ProxiedSite) -> Iterator[ProxiedSite]:
    """The site, restored after each test, so that a failed test does not make others fail."""
    whole_site.longest_s = whole_site.longest_report_s = 0.0
    try:
        yield whole_site
    finally:
        whole_site.restore()


@contextmanager
def call_with_new_tokens(site: ProxiedSite) -> Iterator[list[int | str]]:
    """Call the product from STRANGERS threads with tokens that must first be validated with Keystone.

    Yields the list of the statuses received so far; a caller without an answer adds its error as text.
    """
    statuses: list[int | str] = []

    def call_with(token: str) -> None:
        url, headers = f"{site.cloud.endpoint}/devices", {"X-Auth-Token": token}
        try:
            statuses.append(requests.get(url, headers=headers, timeout=2 * READ_S).status_code)
        except requests.RequestException as error:
            statuses.append(str(error))

    tokens = [site.cloud.keystone.token("reader") for _ in range(STRANGERS)]
    threads = [threading.Thread(target=call_with, args=(token,)) for token in tokens]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("service", ["keystone", "placement", "nova"])
@pytest.mark.parametrize("how", ["slow", "silent"])
def test_L3_reads_and_reports_go_on_and_writes_wait_while_a_service_is_slow_or_silent(
    site: ProxiedSite, service: str, how: str
) -> None:
    product, proxy, end = site.cloud.product, site.proxies[service], time.monotonic() + PHASE_S
    seen = proxy.delayed
    proxy.delay_s, proxy.silent = (SERVICE_DELAY_S, False) if how == "slow" else (0.0, True)
    with watch_for_idle_transactions(product) as idle, call_with_new_tokens(site) as statuses:
        site.read()
        request = site.bind()
        site.set_card("disable")
        while True:
            site.read()
            site.plug_card("unplug", "missing")
            site.read()
            site.plug_card("plug", "maintenance")
            if time.monotonic() > end:
                break
            time.sleep(ROUND_PAUSE_S)
        if how == "silent" and service in INTENTS:
            product.until(lambda: site.has_given_up_once(service), 40, "a call has come to its time-out")
        elif service in INTENTS:
            product.until(lambda: not site.waiting_intents(), 60, "the slow service has been told everything")
        waiting = site.waiting_intents()
    site.make_services_fast()
    print(f"{service} {how}: reads took {site.longest_s:.1f} s at most, reports {site.longest_report_s:.1f} s,")
    print(f"waiting at the end: {waiting}, answers to callers with new tokens: {statuses}")
    if how == "silent" and service in INTENTS:
        assert INTENTS[service] in {kind for kind, *_ in waiting}, f"what {service} was not told does not wait"
    product.until(
        lambda: site.reserved_units() == HANDLES, 60, lambda: f"Placement is not told: {site.waiting_intents()}"
    )
    product.until(
        lambda: "completed" in site.nova.received_statuses().get(request, []),
        60,
        lambda: f"Nova: {site.waiting_intents()}",
    )
    product.until(lambda: site.read_with_new_token() == 200, 60, "Keystone is asked again")
    product.until(lambda: not site.waiting_intents(), 90, lambda: f"{site.waiting_intents()}")
    assert proxy.delayed > seen, f"nobody asked {service}"
    assert not idle, f"transactions were open while a service was asked: {idle}"
    assert site.longest_s < (READ_BEHIND_STRANGERS_S if service == "keystone" else SERVICE_DELAY_S)
    assert site.longest_report_s < REPORT_S
    assert len(statuses) == STRANGERS, f"some callers with new tokens got no answer: {statuses}"
    assert set(statuses) <= ({200} if how == "slow" or service != "keystone" else {503}), statuses
