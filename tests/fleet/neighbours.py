"""The scenario of hostile and slow neighbours: an installation beside them, its three runs, and what the console shows.

The first run has all neighbours at once. In the two control runs the same generators send the same number of requests a
second to a dummy listener on the same cores, and every service is quick; the database is quick in one of them and as
slow as before in the other, because a slow database slows everybody by its round trips.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import requests

from cyborgweb.settings.keys import Keys
from tests.bench import messages
from tests.bench.lab import Lab
from tests.bench.product import run_product, wait_for
from tests.bench.remote_calls import ChildProcess, MeasurementError
from tests.fleet import latencies
from tests.fleet.hostile import (
    AGENT_ADDRESS,
    FIRST_KEY,
    HOSTILE_HOSTS,
    OVERSIZED_HOST,
    REPORTING_HOST,
    TENANT_ADDRESS,
)
from tests.fleet.installation import Fleet, Installation
from tests.fleet.latencies import Latencies
from tests.fleet.steady import instance_id
from tests.fleet.verdict import PromiseLine
from tests.support.nova import FakeNova, running_nova
from tests.system import environments, keystone, placement

if TYPE_CHECKING:
    from tests.fleet.scenarios import ScenarioRun

SERVICE_DELAY_S = 2.0
DATABASE_DELAY_S = 0.005
OFFERED_HOSTS, HOSTILE_OFFERS = 10, 2
"""The number of hosts whose devices can be bound, and how many of them the hostile tenant's instances run on."""
HOSTILE_MEMORY_KB = 160_000
"""What the hostile may occupy in the web process: forty long lists of 3 MB that wait for slow readers, or are made, and
reports of 1 MB."""
CHANGES_PER_S, BINDS_PER_S = 4.0, 2.0
INSTANCES_PER_S = 2 * BINDS_PER_S
SETTLE_S = 2.0
"""Pause between two runs, in which connections are closed and time-outs end."""
CONSOLE_TRIES_S = 40.0
OWN_HOST = "controller.example"
"""The host of the product's own agent."""
ADMINISTRATOR = "fleet-operator"
SHORT_S = 60.0
SHORT_SETTINGS = {"CYBORG_HOST_REPORTS_PER_S": "2", "CYBORG_HOST_REPORT_BYTES_PER_S": "65536"}
"""Settings for runs that are shorter than SHORT_S: with the defaults a host may send for longer than that before its
reports wait."""
PROFILE = "one"
HOOK = "hostile-hook"


@dataclass
class Neighbours:
    """The neighbours of one installation, and what they need to know of it."""

    slow: ChildProcess
    hostile: ChildProcess
    dummy: ChildProcess
    steady: ChildProcess
    nova: FakeNova
    dummy_port: int
    receiver: str
    tokens: dict[str, str]
    password: str

    def set_slow(self, database_s: float, slow: bool) -> None:
        """Make Placement, Nova and the webhook receiver slow or quick, and delay the database by `database_s`."""
        self.slow.ask(
            "set_slowness", database_s=database_s, service_s=SERVICE_DELAY_S if slow else 0.0, receiver_hangs=slow
        )


def _start(lab: Lab, module: str, stack: ExitStack) -> ChildProcess:
    """Start a process of this folder, which is killed when `stack` is closed."""
    with lab.open_log(module) as log:
        child = ChildProcess(f"tests.fleet.{module}", log)
    stack.callback(child.stop)
    return child


@contextmanager
def running_beside_neighbours(state: Path, count: int, devices: int, **settings: str) -> Iterator[Installation]:
    """Run a new product beside its neighbours, all of which are quick and idle; remove everything afterwards.

    Its Keystone and Placement are real; Nova is the fake of the tests. Raises MeasurementError if they cannot be had.
    """
    with Lab(state) as lab, ExitStack() as stack:
        lab.start_database()
        from tests.bench import fixtures

        fixtures.enrol(count)
        tokens, password = _prepare_database()
        try:
            cloud_login = stack.enter_context(keystone.running())
            cloud_placement = stack.enter_context(placement.running(cloud_login))
        except environments.Unavailable as error:
            raise MeasurementError(str(error)) from None
        hosts = [OWN_HOST, *HOSTILE_HOSTS, *map(messages.host_name, range(count))]
        _create_compute_providers(cloud_placement, cloud_login.token("admin"), hosts)
        nova = stack.enter_context(running_nova())
        slow = _start(lab, "slow_neighbours", stack)
        urls = slow.ask(
            "start",
            database=str(lab.postgres.socket),
            folder=str(lab.home / "slow"),
            services={"placement": cloud_placement.url, "nova": nova.url},
        )["urls"]
        dummy = _start(lab, "dummy_listener", stack)
        neighbours = Neighbours(
            slow,
            _start(lab, "hostile", stack),
            dummy,
            _start(lab, "steady", stack),
            nova,
            dummy.ask("start")["port"],
            urls["receiver"],
            tokens,
            password,
        )
        fleet = Fleet(lab)
        stack.callback(fleet.stop)
        defaults = Keys()
        own = cloud_login.environment("service") | {
            "CYBORG_DATABASE_URL": f"postgresql://postgres@/cyborg?host={lab.home}/slow",
            "CYBORG_ENABLED_DRIVERS": "fake_driver",
            "CYBORG_HOST_NAME": OWN_HOST,
            "CYBORG_PLACEMENT_ENDPOINT": urls["placement"],
            "CYBORG_NOVA_ENDPOINT": urls["nova"],
            "CYBORG_HOST_REPORTS_PER_S": str(defaults.host_reports_per_s),
            "CYBORG_HOST_REPORT_BYTES_PER_S": str(defaults.host_report_bytes_per_s),
            "CYBORG_WEBHOOK_ALLOW_HTTP": "on",
            "CYBORG_WEBHOOK_NETWORKS": "127.0.0.0/8",
        }
        with run_product(lab, **own | settings) as product:
            installation = Installation(
                lab, product, fleet, count, devices, neighbours=neighbours, extra_memory_kb=HOSTILE_MEMORY_KB
            )
            wait_for(lambda: installation.query("SELECT FROM accelerators_device LIMIT 1"), "the first merge")
            yield installation


def _create_compute_providers(cloud_placement: placement.Placement, token: str, hosts: list[str]) -> None:
    """Create the providers of compute hosts, as Nova does."""
    with requests.Session() as nova:
        nova.headers.update({"X-Auth-Token": token, "OpenStack-API-Version": "placement 1.39"})
        for host in hosts:
            answer = nova.post(
                f"{cloud_placement.url}/resource_providers", json={"name": host, "uuid": str(uuid4())}, timeout=30
            )
            answer.raise_for_status()


def _prepare_database() -> tuple[dict[str, str], str]:
    """Enrol the hostile hosts; make the callers' tokens, the device profile, the rule that offers devices, and a user
    of the console. Return the tokens by name, and the user's password."""
    from django.contrib.auth.models import User
    from django.db import connection

    from accelerators import conductor
    from accelerators.models import AdmissionRule, DeviceProfile, Host
    from agents.models import Agent
    from cyborgweb.models import ApiToken

    password = secrets.token_urlsafe()
    with conductor.writing():
        for number, name in enumerate(HOSTILE_HOSTS):
            host = Host.objects.create(name=name, node=name)
            Agent.objects.create(host=host, public_key=messages.public_key(FIRST_KEY + number))
        DeviceProfile.objects.create(name=PROFILE, groups=[{"resources:FPGA": "1"}])
        for number in range(OFFERED_HOSTS):
            AdmissionRule.objects.create(name=f"offer-{number}", host=messages.host_name(number), action="ready")
    user = User.objects.create_superuser(ADMINISTRATOR, password=password)
    tokens = {
        name: ApiToken.create_with_secret(f"fleet-{name}", user, roles, project)
        for name, roles, project in (
            ("steady", ["admin", "member", "reader"], "steady"),
            ("nova", ["service"], "services"),
            ("hostile", ["member", "reader"], "hostile"),
        )
    }
    connection.close()
    return tokens, password


def hostile_neighbours(run: ScenarioRun) -> list[PromiseLine]:
    """Measure the well-behaved beside all hostile and slow neighbours, then beside none; compare. Read the console."""
    installation = run.installation
    neighbours = installation.neighbours
    if neighbours is None:
        raise MeasurementError("this scenario runs by itself, and not after others")
    run.ask("seed", number=run.seed)
    known = int(3 * run.neighbours_s * INSTANCES_PER_S) + 1000
    neighbours.nova.servers = [instance_id(run.seed, number) for number in range(known)]
    neighbours.nova.known = dict.fromkeys(neighbours.nova.servers, 200)
    installation.power_on()
    run.wait_until_settled()
    offers = wait_for(lambda: _find_offers(installation), "providers of all offered devices", patience_s=run.patience_s)
    steady_offers, hostile_offers = offers[: -HOSTILE_OFFERS * installation.devices], offers[-installation.devices :]
    ((device,),) = installation.query(SELECT_UNUSED_DEVICE, offers[-installation.devices - 1][0]) or [("",)]
    target = {
        "port": installation.product.port,
        "tokens": {"X-Auth-Token": neighbours.tokens["hostile"]},
        "nova": {"X-Auth-Token": neighbours.tokens["hostile"], "X-Service-Token": neighbours.tokens["nova"]},
        "offers": hostile_offers,
        "foreign_request": _create_foreign_request(installation),
        "webhook": neighbours.receiver,
        "victims": [messages.host_name(number) for number in range(installation.count)],
    }
    neighbours.set_slow(run.database_delay_s, slow=True)
    neighbours.hostile.ask("start", target=target, seed=run.seed)
    found = measure(run, steady_offers, device)
    missing = look_at_console(installation)
    totals = neighbours.hostile.ask("stop")
    merges = _read_merge_times(installation)
    _delete_hostile_requests(installation)
    with installation.connect(autocommit=True) as database:
        database.execute(DELETE_HOSTILE_REPORTS)
    slow_totals = neighbours.slow.ask("get_totals")
    neighbours.set_slow(0.0, slow=False)
    run.wait_until_settled()
    controls = {}
    for name, delay_s in (
        ("database quick in the control", 0.0),
        ("database slow in the control", run.database_delay_s),
    ):
        time.sleep(SETTLE_S)
        neighbours.set_slow(delay_s, slow=False)
        neighbours.hostile.ask(
            "start", target=target | {"port": neighbours.dummy_port}, seed=run.seed, rates=totals["rates"]
        )
        controls[name] = measure(run, steady_offers, device)
        neighbours.hostile.ask("stop")
    neighbours.set_slow(0.0, slow=False)
    stored = installation.query(STORED_DEVICES, REPORTING_HOST) or [(0,)]
    print(f"hostile: {_describe(totals)}\nslow: {slow_totals}\nmerges by time: {merges}", flush=True)
    return [
        *latencies.compare_runs(found, controls, run.factor or None),
        *latencies.judge_refusals(totals["outcomes"], totals["rates"], stored[0][0], Keys().max_devices_per_host),
        *latencies.judge_names(missing, WANTED_NAMES),
    ]


STORED_DEVICES = """
SELECT count(*) FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id WHERE h.name = %s
"""
DELETE_HOSTILE_REPORTS = """
DELETE FROM spool s USING accelerators_host h WHERE h.id = s.host_id AND h.name LIKE 'hostile-%'
"""
"""Its last reports wait for minutes, because the host has used more than its share."""
SPOOLED_REPORTS = """
SELECT s.id FROM spool s JOIN accelerators_host h ON h.id = s.host_id WHERE h.name LIKE 'bench-%' LIMIT 1
"""
"""A report of a well-behaved host that is not merged yet."""
SELECT_OFFERS = """
SELECT h.name, p.rp_uuid::text FROM accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id
JOIN accelerators_host h ON h.id = d.host_id
WHERE h.name LIKE 'bench-%' AND d.state = 'ready' AND p.rp_uuid IS NOT NULL ORDER BY h.name, p.id
"""
SELECT_UNUSED_DEVICE = """
SELECT d.uuid::text FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id
WHERE h.name = %s ORDER BY d.id LIMIT 1
"""
WAITING_PROVIDERS = "SELECT count(*) FROM accelerators_intent WHERE kind = 'provider'"


def _find_offers(installation: Installation) -> list[tuple[str, str]]:
    """Return (host, provider) of all offered devices; [] until all have a provider and Placement knows them."""
    offers = installation.query(SELECT_OFFERS) or []
    waiting = installation.query(WAITING_PROVIDERS)
    is_complete = len(offers) >= OFFERED_HOSTS * installation.devices and waiting == [(0,)]
    return [(host, provider) for host, provider in offers] if is_complete else []


def _create_foreign_request(installation: Installation) -> str:
    """Create a request of the steady client's project, and return its uuid."""
    assert installation.neighbours
    answer = requests.post(
        f"http://127.0.0.1:{installation.product.port}/v2/accelerator_requests",
        json={"device_profile_name": PROFILE},
        headers={"X-Auth-Token": installation.neighbours.tokens["steady"]},
        timeout=30,
    )
    if answer.status_code != 201:
        raise MeasurementError(f"no request can be created: {answer.status_code} {answer.text}")
    return str(answer.json()["arqs"][0]["uuid"])


def _delete_hostile_requests(installation: Installation) -> None:
    """Delete the requests that the hostile tenant has left, because Nova does not know their instances."""
    assert installation.neighbours
    url = f"http://127.0.0.1:{installation.product.port}/v2/accelerator_requests"
    headers = {"X-Auth-Token": installation.neighbours.tokens["hostile"]}
    listed = wait_for(
        lambda: (answer := requests.get(url, headers=headers, timeout=60)).status_code != 503 and answer,
        "a list of the hostile tenant's requests, after its earlier lists",
    )
    left = listed.json()["arqs"]
    headers["X-Service-Token"] = installation.neighbours.tokens["nova"]
    for request in left:
        answer = requests.delete(url, params={"arqs": request["uuid"]}, headers=headers, timeout=60)
        if answer.status_code != 204:
            raise MeasurementError(f"a request of the hostile tenant cannot be deleted: {answer.text}")


def measure(run: ScenarioRun, offers: list[tuple[str, str]], device: str) -> Latencies:
    """Let agents change and the steady client bind for `neighbours_s` seconds; return the durations."""
    neighbours = run.installation.neighbours
    assert neighbours
    run.ask("take_timings")
    neighbours.steady.ask(
        "start",
        port=run.installation.product.port,
        tokens={"X-Auth-Token": neighbours.tokens["steady"], "X-Service-Token": neighbours.tokens["nova"]},
        offers=offers,
        device=device,
        seed=run.seed,
        per_s=BINDS_PER_S,
        database=str(run.installation.lab.postgres.socket),
    )
    run.ask("set_unrest", changes_per_s=CHANGES_PER_S)
    run.watch(run.neighbours_s)
    run.ask("set_unrest")
    bound = neighbours.steady.ask("stop_binding")
    end = time.monotonic() + run.patience_s
    while run.ask("get_totals")["owing"] and time.monotonic() < end:
        time.sleep(0.2)
    while run.installation.query(SPOOLED_REPORTS) and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(2 * latencies.RESOLUTION_S)
    sightings = neighbours.steady.ask("stop_watching")["visible"]
    print(f"failed binds: {bound['failures']}; a device disabled or enabled: {bound['toggles']}", flush=True)
    return latencies.compute_latencies(
        run.ask("take_timings")["timings"], sightings, bound["bound_s"], sum(bound["failures"].values())
    )


def _read_merge_times(installation: Installation) -> str:
    """Return how many merges took at most how long, from the product's metrics; one number includes those before it."""
    text = _get_text(installation, "/metrics")
    counts = re.findall(r'cyborg_merge_seconds_bucket\{le="([^"]+)"\} (\d+)', text)
    return ", ".join(f"{count} in {seconds} s" for seconds, count in counts)


def _get_text(installation: Installation, path: str) -> str:
    return requests.get(f"http://127.0.0.1:{installation.product.port}{path}", timeout=60).text


def _describe(totals: dict[str, Any]) -> str:
    """Return the outcomes and rates of the attacks as text."""
    attacks = (
        f"{name} {totals['rates'][name]:.1f}/s ({', '.join(f'{n} {label}' for label, n in sorted(counts.items()))})"
        for name, counts in totals["outcomes"].items()
    )
    return f"{totals['megabytes']:.0f} MB; {'; '.join(attacks)}"


OVERVIEW = "/admin/"
EVENT_LINK = r"/admin/accelerators/event/\d+/(?:change/)?"
REFUSALS = "/admin/accelerators/event/?q=agent.refused"
UNPROVEN_REFUSALS = "/admin/accelerators/event/?q=action:agent.refused+host:(unknown)"
UNPROVEN_REFUSAL = "the newest event about clients that have proven nothing"
SUBSCRIPTIONS = "/admin/cyborgweb/subscription/"
WANTED_NAMES: dict[str, list[tuple[str, str]]] = {
    "the host with too many devices": [(OVERVIEW, REPORTING_HOST), (OVERVIEW, "CYBORG_MAX_DEVICES_PER_HOST")],
    "the host that claims another's provider": [(OVERVIEW, "stealing_driver")],
    "the host with oversized frames": [(REFUSALS, OVERSIZED_HOST), (REFUSALS, "too-large")],
    "the host above its share": [(REFUSALS, REPORTING_HOST), (REFUSALS, "throttled")],
    "the address of forged handshakes": [(UNPROVEN_REFUSAL, AGENT_ADDRESS)],
    "the subscription of the slow receiver": [(SUBSCRIPTIONS, HOOK), (SUBSCRIPTIONS, "failing")],
    "the slow Placement": [(OVERVIEW, "Placement answers slowly")],
    "the slow Nova": [(OVERVIEW, "Nova answers slowly")],
    "the slow database": [(OVERVIEW, "The database answers slowly")],
    "the address of slow clients": [(OVERVIEW, TENANT_ADDRESS)],
}
"""For each culprit the texts that must stand on pages of the console: (page, text)."""


def look_at_console(installation: Installation) -> dict[str, str]:
    """Log in to the console, and return what its pages lack of WANTED_NAMES; look again for CONSOLE_TRIES_S seconds."""
    end = time.monotonic() + CONSOLE_TRIES_S
    with requests.Session() as browser:
        _log_in(installation, browser)
        while True:
            pages = {
                page: _show_text(_get_page(installation, browser, page)) for page in (OVERVIEW, REFUSALS, SUBSCRIPTIONS)
            }
            if event := re.search(EVENT_LINK, _get_page(installation, browser, UNPROVEN_REFUSALS)):
                pages[UNPROVEN_REFUSAL] = _show_text(_get_page(installation, browser, event[0]))
            missing = latencies.find_unnamed(pages, WANTED_NAMES)
            if not missing or time.monotonic() > end:
                return missing
            time.sleep(2.0)


def _get_page(installation: Installation, browser: requests.Session, path: str) -> str:
    return browser.get(f"http://127.0.0.1:{installation.product.port}{path}", timeout=60).text


def _show_text(page: str) -> str:
    """Return the text of a page without its tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def _log_in(installation: Installation, browser: requests.Session) -> None:
    assert installation.neighbours
    form = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', _get_page(installation, browser, "/admin/login/"))
    if not form:
        raise MeasurementError("the console shows no login form")
    answer = browser.post(
        f"http://127.0.0.1:{installation.product.port}/admin/login/",
        {"csrfmiddlewaretoken": form[1], "username": ADMINISTRATOR, "password": installation.neighbours.password},
        headers={"Referer": f"http://127.0.0.1:{installation.product.port}/admin/login/"},
        timeout=60,
        allow_redirects=False,
    )
    if answer.status_code != 302:
        raise MeasurementError(f"nobody can log in to the console: {answer.status_code}")
