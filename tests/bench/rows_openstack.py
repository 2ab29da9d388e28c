"""Rows of the product in a cloud: the time until Placement shows a change, and until Nova is notified of a bind.

Keystone and Placement are real and run in their own environments; Nova is the fake of the tests. All of them use
loopback and the same cores as the product.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from tests.bench import rows_placement
from tests.bench.api_clients import BIND, PROFILE
from tests.bench.figures import Row, median
from tests.bench.lab import Lab
from tests.bench.product import RunningProduct, run_product, wait_for
from tests.bench.remote_calls import MeasurementError
from tests.support import nova as novas
from tests.support.nova import FakeNova
from tests.system import environments, keystone, placement
from tests.system.placement import Placement

HOST = "bench-cloud"
PAUSE_S = 0.002
OFFERED = """
SELECT d.uuid::text, p.rp_uuid::text FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id
JOIN accelerators_deployable p ON p.device_id = d.id WHERE h.name = %s
"""


def rows(lab: Lab, *, full: bool, progress: Callable[[str], None]) -> list[Row]:
    """Return the rows; print a warning and return [] if Keystone and Placement are not installed."""
    if not environments.installed("keystone", "placement"):
        progress("NOT MEASURED: Placement and Nova (make environments installs what these rows need)")
        return []
    progress("starting Keystone and Placement")
    lab.stop_database()
    with keystone.running() as identity, placement.running(identity) as placement_service, novas.running_nova() as nova:
        lab.start_database()
        found = rows_placement.rows(placement_service, 500 if full else 30, 3 if full else 1, progress)
        lab.stop_database()
        cloud = identity.environment("service") | {"CYBORG_NOVA_ENDPOINT": nova.url, "CYBORG_HOST_NAME": HOST}
        cloud |= {"CYBORG_HOST_NODE": HOST, "CYBORG_ENABLED_DRIVERS": "fake_driver"}
        cloud |= {"CYBORG_AGENT_STATE_DIR": str(lab.home / "agent-in-a-cloud")}  # an agent's key belongs to one host
        with run_product(lab, **cloud) as product:
            samples = 300 if full else 30
            progress(f"a device leaves and enters offer, {samples} times; then as many requests are bound")
            found += _measure_product(product, placement_service, nova, samples)
    return found


def _measure_product(product: RunningProduct, placement_service: Placement, nova: FakeNova, samples: int) -> list[Row]:
    from tests.bench import inventory

    api = _JsonClient(product.port, inventory.create_tokens())
    placement_api = _JsonClient(placement_service.port, {"X-Auth-Token": placement_service.keystone.token("admin")})
    device, provider = _offer_fake_device(api, placement_api, placement_service)
    shown = [_time_offer_change(api, placement_api, device, provider, number % 2 == 1) for number in range(samples)]
    notified = [_time_nova_event(api, nova, provider) for _ in range(samples)]
    rows_placement.delete_written_records()
    against = "idle, from before the request"
    return [
        *_make_latency_rows("a device leaves or enters offer to Placement", shown, against, {50: 300.0, 99: 1000.0}),
        *_make_latency_rows("request bound to Nova's notice", notified, "idle, from before the PATCH", {99: 500.0}),
    ]


def _make_latency_rows(name: str, times: list[float], against: str, bounds: dict[int, float]) -> list[Row]:
    times = sorted(times)
    which = {50: median(times), 99: times[min(len(times) - 1, len(times) * 99 // 100)]}
    note = f"of {len(times)}; from {times[0]:.0f} to {times[-1]:.0f} ms, the middle {median(times):.0f} ms"
    return [Row(f"{name}, p{p}", which[p], "ms", against, bound, note=note) for p, bound in bounds.items()]


def _offer_fake_device(api: _JsonClient, placement_api: _JsonClient, placement_service: Placement) -> tuple[str, str]:
    """Enable the fake device, wait for it in Placement and create a profile; return its device and its provider."""
    from django.db import connection

    from accelerators import conductor
    from accelerators.models import DeviceProfile

    placement_service.create_compute_provider(HOST)
    with connection.cursor() as cursor:

        def found() -> Any:
            cursor.execute(OFFERED, [HOST])
            return cursor.fetchone()

        device, _ = wait_for(found, "the fake card")
        api.request("POST", f"/v2/devices/{device}/enable", 204)
        _, provider = found()
    with conductor.writing():
        DeviceProfile.objects.get_or_create(name=PROFILE, defaults={"groups": [{"resources:FPGA": "1"}]})
    wait_for(lambda: _get_reserved(placement_api, provider) == 0, "the fake card in Placement")
    return device, provider


def _get_reserved(placement_api: _JsonClient, provider: str) -> int:
    """Return the `reserved` of a provider's inventory in Placement; -1 while there is no such inventory."""
    found = placement_api.request("GET", f"/resource_providers?uuid={provider}", 200)["resource_providers"]
    if not found:
        return -1
    inventories = placement_api.request("GET", f"/resource_providers/{provider}/inventories", 200)["inventories"]
    return int(inventories.get("FPGA", {}).get("reserved", -1))


def _time_offer_change(api: _JsonClient, placement_api: _JsonClient, device: str, provider: str, offer: bool) -> float:
    """Enable or disable a device; return the milliseconds until Placement shows it, from before the request."""
    sleep(0.05)
    began = monotonic()
    api.request("POST", f"/v2/devices/{device}/{'enable' if offer else 'disable'}", 204)
    while True:
        now = placement_api.request("GET", f"/resource_providers/{provider}/inventories", 200)["inventories"]["FPGA"]
        if (now["reserved"] == 0) is offer:
            return (monotonic() - began) * 1000
        if monotonic() > began + 30:
            raise MeasurementError("Placement does not show within 30 s what was changed")
        sleep(PAUSE_S)


def _time_nova_event(api: _JsonClient, nova: FakeNova, provider: str) -> float:
    """Bind a request; return the milliseconds from before the PATCH until Nova has the event; delete the request."""
    instance = str(uuid4())
    nova.known[instance] = 200
    made = api.request("POST", "/v2/accelerator_requests", 201, {"device_profile_name": PROFILE})
    uuid = made["arqs"][0]["uuid"]
    values = zip(BIND, (HOST, provider, instance), strict=True)
    began = monotonic()
    bound = [{"op": "add", "path": f"/{name}", "value": value} for name, value in values]
    api.request("PATCH", "/v2/accelerator_requests", 202, {uuid: bound})
    wait_for(lambda: uuid in nova.received_statuses(), "the notice", patience_s=30)
    took = (monotonic() - began) * 1000
    api.request("DELETE", f"/v2/accelerator_requests?arqs={uuid}", 204)
    return took


class _JsonClient:
    """A JSON client that opens a connection for each request, because servers close idle connections."""

    def __init__(self, port: int, headers: dict[str, str]) -> None:
        self._port = port
        self._headers = headers | {"Content-Type": "application/json", "Accept": "application/json"}

    def request(self, method: str, path: str, status: int, body: Any = None) -> Any:
        """Return the decoded response; raise MeasurementError if its status is not `status`."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, self._headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != status:
            raise MeasurementError(f"{method} {path}: {answer.status} {text[:200]!r}")
        return json.loads(text) if text else None
