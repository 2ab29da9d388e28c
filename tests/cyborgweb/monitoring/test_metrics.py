"""Test `/metrics` as Prometheus reads it: permissions, counters, statements, and counters of forked processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings
from django.db import OperationalError, connection
from django.test import Client
from django.urls import get_resolver
from keystoneauth1.exceptions import ConnectFailure, Unauthorized
from keystoneauth1.noauth import NoAuth
from keystoneauth1.session import Session
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed

from accelerators import conductor, slow_neighbours
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Attachment,
    Command,
    Device,
    DeviceProfile,
    Host,
    Rollout,
)
from accelerators.requests import binding, profiles
from accelerators.runtime import metric_files
from agents import authentication, credentials, jobs, telemetry, wire
from agents.gateway import metrics
from agents.gateway.asgi_app import AgentGateway
from cyborgweb.asgi import HttpApplication
from cyborgweb.http.django_threads import DjangoThreads
from cyborgweb.monitoring import calls, page, served, snapshot
from cyborgweb.settings.keys import Keys, get_keys
from cyborgweb.wsgi import application
from drivers.configuration import ConfigurationError
from placement_sync.models import Discrepancy, NovaEndpoint
from tests.support.reports import apply_report, create_heard_host, get_or_create_host, make_card, make_driver_report
from tests.support.requests import bind_new_requests, create_profiles, offer_devices
from tests.support.webserver import serving, until
from tests.support.wireagent import WireAgent, ask

pytestmark = pytest.mark.django_db(transaction=True)
METRICS_TOKEN = "sixteen-at-least-and-secret"
REMOTE_ADDRESS = "192.0.2.7"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(autouse=True)
def _reset_metrics() -> None:
    """Clear the cached page and add the pending counts of gateways, so that no test sees counts of another."""
    page.metrics_cache.clear()
    metrics.push_metrics()


@pytest.fixture
def port() -> Iterator[int]:
    """Serve the product in one process, with a gateway that stores its counts after 0.05 s, and yield the port."""
    gateway = AgentGateway(Keys(lease_flush_s=0.05))
    http = HttpApplication(gateway, DjangoThreads(application, Keys(request_threads=2, request_queue=20)))

    async def product(scope: Any, receive: Any, send: Any) -> None:
        await (http if scope["type"] == "http" else gateway)(scope, receive, send)

    with serving(product) as port:
        yield port
    gateway.stop()


def scrape(port: int = 0) -> Series:
    """Return every sample of a fresh scrape by its name and labels; without a port, the test client gets the page."""
    page.metrics_cache.clear()
    address = f"http://127.0.0.1:{port}/metrics"
    text = (urllib.request.urlopen(address, timeout=20).read() if port else Client().get("/metrics").content).decode()
    return {(one.name, frozenset(one.labels.items())): one.value for family in parsed(text) for one in family.samples}


def get_value(series: Series, name: str, **labels: str) -> float:
    """Return the value of one sample; 0 if it has not been counted yet."""
    return series.get((name, frozenset(labels.items())), 0.0)


def compute_increase(before: Series, after: Series) -> Callable[..., float]:
    """Return a function that computes by how much one sample has increased."""
    return lambda name, **labels: get_value(after, name, **labels) - get_value(before, name, **labels)


def test_open_work_is_counted_by_state_and_ended_work_is_not() -> None:
    host, now = get_or_create_host(), datetime.now(UTC)
    apply_report(host, make_driver_report(make_card(1)))
    command = {"host": host, "op": "rescan", "start_by": now, "end_by": now}
    attachment = {"instance": uuid4(), "project_id": "p1", "host": "cmp1", "actor": "olga"}
    discrepancy = {"host": host, "instance": uuid4(), "since": now, "seen_at": now, "said": "why"}
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="small", groups=[{"resources:FPGA": "1"}])
        for state in ("Initial", "Initial", "Unbound"):
            AcceleratorRequest.objects.create(project_id="p1", state=state, profile=profile, group={})
        for ended_at in (None, None, now):
            Command.objects.create(**command, ended_at=ended_at)
            Attachment.objects.create(**attachment, ended_at=ended_at)
            Rollout.objects.create(op="disable", driver="fake", source="person", actor="olga", ended_at=ended_at)
        for kind in ("unclaimed", "unattached"):
            Discrepancy.objects.create(**discrepancy, kind=kind, provider=uuid4())
        conductor.record_event("request.created", EventSource.SYSTEM, "test")
    NovaEndpoint.objects.create(url="http://elsewhere", unknown_instances=4)
    NovaEndpoint.objects.create(url="http://here", unknown_instances=8, confirmed_at=now)
    series = scrape()
    assert get_value(series, "cyborg_nova_unknown_instances") == 4
    assert get_value(series, "cyborg_requests", state="Initial") == 2
    assert get_value(series, "cyborg_requests", state="Unbound") == 1
    assert get_value(series, "cyborg_commands_open", state="queued") == 2
    assert get_value(series, "cyborg_attachments_open", state="asked") == 2
    assert get_value(series, "cyborg_rollouts_open") == 2
    assert get_value(series, "cyborg_discrepancies", kind="unclaimed") == 1
    assert get_value(series, "cyborg_discrepancies", kind="unattached") == 1
    assert sum(number for (name, _), number in series.items() if name == "cyborg_host_drivers") == 1


@pytest.mark.slow
def test_agent_messages_merges_and_http_requests_are_counted_in_the_next_scrape(port: int) -> None:
    before = scrape(port)
    made = authentication.create_join_token("cmp1", address="http://x", hours=1, created_by="t")
    agent = WireAgent(port, token=credentials.parse_join_string(made).secret)
    drivers = (make_driver_report(make_card(1), make_card(2)),)
    with agent.connect() as socket:
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        assert ask(socket, wire.Report(1, 2, wire.hash_report_content(drivers), drivers)) == wire.Ack(2, "Report")
        socket.send('{"type":"Prophecy","when":"soon"}')
        assert WireAgent(port, host="cmp2").connect_refused()[0] == 403
        assert Client().get(f"/api/devices/{uuid4()}/").status_code == 401
        until(lambda: compute_increase(before, scrape(port))("cyborg_agent_reports_total") == 1)
        during = scrape(port)
        jobs.merge()
        after = compute_increase(before, scrape(port))
    assert get_value(during, "cyborg_spool_reports") == 1
    assert get_value(during, "cyborg_agents", state="up") == 1
    assert after("cyborg_agent_handshakes_total") == after("cyborg_agent_beats_total") == 1
    assert after("cyborg_agent_refusals_total", code="not-enrolled") == 1
    assert after("cyborg_agent_unknown_total", kind="types") == 1
    assert after("cyborg_spool_reports") == 0
    assert after("cyborg_merge_devices_sum") == 2 and after("cyborg_merge_seconds_count") == 1
    assert after("cyborg_devices", state="inactive", type="FPGA", health="ok") == 2
    route = {"route": "/api/devices/{uuid}", "method": "GET"}
    assert after("cyborg_http_requests_total", status="4xx", **route) == 1
    assert after("cyborg_http_request_seconds_count", **route) == 1
    until(lambda: compute_increase(before, scrape(port))("cyborg_agent_connections") == 0)


def test_binds_are_counted_by_outcome() -> None:
    provider = str(uuid4())
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=2)))
    offer_devices(provider)
    create_profiles(one={})
    with conductor.writing():
        first, _ = AttachHandle.objects.order_by("id")
        AttachHandle.objects.exclude(id=first.id).update(attach_type="MDEV")
    profiles.clear_profile_cache()
    before = scrape()

    bind_new_requests("one", provider)
    bind_new_requests("one", provider)
    with pytest.raises(RefusedError):
        bind_new_requests("one", provider)
    with conductor.writing():
        AcceleratorRequest.objects.filter(state="BindStarted").update(deadline="2020-01-01T00:00:00Z")
    binding.fail_overdue_binds()
    after = compute_increase(before, scrape())
    assert [after("cyborg_binds_total", outcome=word) for word in ("bound", "started", "failed")] == [1, 1, 2]
    assert after("cyborg_bind_answer_seconds_count", outcome="reserved") == 2
    assert after("cyborg_bind_answer_seconds_count", outcome="none_free") == 1
    assert after("cyborg_bind_host_seconds_count", outcome="failed") == 1
    assert after("cyborg_requests", state="Bound") == 1


def test_cloud_calls_are_counted_by_service_method_and_status(port: int) -> None:
    before, session = scrape(), calls.count_calls(Session(auth=NoAuth()))
    session.get(f"http://127.0.0.1:{port}/healthz", endpoint_filter={"service_type": "placement"})
    with pytest.raises(Unauthorized):
        session.get(f"http://127.0.0.1:{port}/nowhere", endpoint_filter={"service_type": "compute"})
    with pytest.raises(ConnectFailure):
        session.post("http://127.0.0.1:1/auth/tokens", connect_retries=0)
    after = compute_increase(before, scrape())
    assert after("cyborg_cloud_calls_total", service="placement", method="GET", status="200") == 1
    assert after("cyborg_cloud_calls_total", service="nova", method="GET", status="401") == 1
    assert after("cyborg_cloud_calls_total", service="keystone", method="POST", status="unreachable") == 1
    assert after("cyborg_cloud_call_seconds_count", service="nova", method="GET") == 1


def test_a_service_whose_calls_take_a_second_or_longer_is_noted_as_slow(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(slow_neighbours, "note", lambda name, *_, **options: noted.append(name))
    session = calls.count_calls(Session(auth=NoAuth()))
    session.get(f"http://127.0.0.1:{port}/healthz", endpoint_filter={"service_type": "placement"})
    assert not noted
    monkeypatch.setattr(calls, "SLOW_CALL_S", 0.0)
    session.get(f"http://127.0.0.1:{port}/healthz", endpoint_filter={"service_type": "compute"})
    assert noted == ["Nova"]


@pytest.mark.parametrize(
    ("caller", "status"),
    [
        ({"REMOTE_ADDR": "127.0.0.1"}, 200),
        ({"REMOTE_ADDR": "::1"}, 200),
        ({"REMOTE_ADDR": REMOTE_ADDRESS}, 403),
        ({"REMOTE_ADDR": ""}, 403),
        ({"REMOTE_ADDR": "127.0.0.1", "HTTP_X_FORWARDED_FOR": "127.0.0.1"}, 403),
        ({"REMOTE_ADDR": "127.0.0.1", "HTTP_X_FORWARDED_PREFIX": "/x"}, 403),
        ({"REMOTE_ADDR": "127.0.0.1", "HTTP_FORWARDED": "for=127.0.0.1"}, 403),
        ({"REMOTE_ADDR": REMOTE_ADDRESS, "HTTP_AUTHORIZATION": f"Bearer {METRICS_TOKEN}"}, 200),
        ({"REMOTE_ADDR": "127.0.0.1", "HTTP_VIA": "1.1 proxy", "HTTP_AUTHORIZATION": f"bearer {METRICS_TOKEN}"}, 200),
        ({"REMOTE_ADDR": REMOTE_ADDRESS, "HTTP_AUTHORIZATION": f"Basic {METRICS_TOKEN}"}, 403),
        ({"REMOTE_ADDR": REMOTE_ADDRESS, "HTTP_AUTHORIZATION": "Bearer sixteen-at-least-é"}, 403),
    ],
)
def test_metrics_are_answered_to_loopback_without_proxy_or_to_the_bearer_token_only(
    client: Client, monkeypatch: pytest.MonkeyPatch, caller: dict[str, str], status: int
) -> None:
    monkeypatch.setattr(settings, "KEYS", replace(settings.KEYS, metrics_token=METRICS_TOKEN))
    answered = client.get("/metrics", **caller)
    assert answered.status_code == status
    assert status == 200 or "CYBORG_METRICS_TOKEN" in answered.content.decode()


def test_an_empty_bearer_token_is_refused_when_no_token_is_configured(client: Client) -> None:
    for said in ("Bearer ", "Bearer", ""):
        assert client.get("/metrics", REMOTE_ADDR=REMOTE_ADDRESS, HTTP_AUTHORIZATION=said).status_code == 403


def test_metrics_are_served_as_openmetrics_if_accepted(client: Client) -> None:
    answered = client.get("/metrics", HTTP_ACCEPT="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert answered["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert "cyborg_binds" in {family.name for family in openmetrics(answered.content.decode())}


def test_a_scrape_takes_the_same_statements_at_any_size_and_is_cached_for_other_scrapers(
    client: Client, django_assert_max_num_queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "KEYS", replace(settings.KEYS, metrics_devices=True))
    spent = []
    for hosts in (["cmp1"], [f"cmp{n}" for n in range(2, 8)]):
        for name in hosts:
            create_heard_host(name, 10)
        telemetry.forget_gateways()
        page.metrics_cache.clear()
        with django_assert_max_num_queries(10) as context:
            client.get("/metrics")
        spent.append(len(context))
    assert spent[0] == spent[1]
    with django_assert_max_num_queries(0):
        for _ in range(10):
            client.get("/metrics")


def test_metrics_without_the_database_show_it_down_and_still_contain_counters(client: Client) -> None:
    client.get("/healthz")

    def away(*_: object) -> None:
        raise OperationalError("the server closed the connection")

    with connection.execute_wrapper(away):
        series = scrape()
    assert get_value(series, "cyborg_database_up") == 0
    assert get_value(series, "cyborg_http_requests_total", route="/healthz", method="GET", status="2xx") >= 1
    assert not [name for name, _ in series if name == "cyborg_hosts"]
    assert get_value(scrape(), "cyborg_database_up") == 1


@pytest.mark.slow
def test_device_load_series_appear_only_if_configured_and_their_number_is_bounded(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = authentication.create_join_token("cmp1", address="http://x", hours=1, created_by="t")
    agent = WireAgent(port, token=credentials.parse_join_string(made).secret)
    with agent.connect_and_say_hello() as socket:
        apply_report(Host.objects.get(), make_driver_report(make_card(1)))
        device = Device.objects.get()
        loads = (wire.DeviceLoad(device.key, {"power_watts": 71.5, "utilization_percent": 40.0}),)
        socket.send(wire.encode_message(wire.Samples((*loads, wire.DeviceLoad("pci:gone", {"power_watts": 1.0})))))
        ask(socket, wire.Beat(1))
        before = scrape(port)
        monkeypatch.setattr(settings, "KEYS", replace(settings.KEYS, metrics_devices=True))
        after = scrape(port)
        monkeypatch.setattr(snapshot, "MAX_SERIES", 1)
        bounded = scrape(port)
    labels = {"host": "cmp1", "device": str(device.uuid), "type": "FPGA", "metric": "power_watts"}
    assert not [name for name, _ in before if name.startswith("cyborg_device_load")]
    assert get_value(after, "cyborg_device_load", **labels) == 71.5
    assert get_value(after, "cyborg_device_load_left_out") == 1
    assert len([name for name, _ in bounded if name == "cyborg_device_load"]) == 1
    assert get_value(bounded, "cyborg_device_load_left_out") == 2


def test_device_load_series_are_bounded_for_each_host_and_unknown_metrics_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    greedy, modest = create_heard_host("cmp1", 3), create_heard_host("cmp2", 1)
    known_metrics = {"temperature_celsius": 61.0, "temperature_celsius_63": 50.0, "power_watts": 75.0}
    unknown_metrics = dict.fromkeys(
        ("of_my_own", "temperature_celsius_064", "temperature_celsius_100", "power_watts_2"), 1.0
    )

    def last() -> telemetry.LoadSnapshot:
        said = {
            host: dict.fromkeys(host.devices.values_list("key", flat=True), known_metrics) for host in (greedy, modest)
        }
        said[greedy] = {key: unknown_metrics | values for key, values in said[greedy].items()}
        return telemetry.LoadSnapshot(
            {host.pk: telemetry.HostLoad(host.pk, time.time(), devices) for host, devices in said.items()}
        )

    monkeypatch.setattr(telemetry, "get_last_loads", last)
    monkeypatch.setattr(settings, "KEYS", replace(settings.KEYS, metrics_devices=True))
    monkeypatch.setattr(snapshot, "MAX_SERIES_PER_HOST", 4)
    told = scrape()
    series = [dict(labels) for name, labels in told if name == "cyborg_device_load"]
    assert Counter(one["host"] for one in series) == {"cmp1": 4, "cmp2": 3}
    assert {one["metric"] for one in series} == {*known_metrics}
    assert get_value(told, "cyborg_device_load_left_out") == 3 * (len(known_metrics) + len(unknown_metrics)) - 4


def test_every_route_has_a_readable_template_as_its_label() -> None:
    def routes(of: Any, before: str = "") -> Iterator[str]:
        for pattern in of.url_patterns:
            route = before + str(pattern.pattern)
            yield from routes(pattern, route) if hasattr(pattern, "url_patterns") else [route]

    made = {route: served.format_route(route) for route in routes(get_resolver())}
    assert not [pair for pair in made.items() if not re.fullmatch(r"(?:/[\w.{}-]*)+|\(none\)", pair[1])]
    assert {"/v2/devices/{uuid}", "/api/hosts/{uuid}", "/admin/accelerators/device/", "/healthz"} <= {*made.values()}
    assert "/v2/deployables/{uuid}/program" in made.values()


COUNTING_PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from accelerators.runtime import metric_files, metrics
where = metric_files.metrics_folder()
done, now = metrics.create_counter("cyborg_done_total", "Done.", "by"), metrics.create_gauge("cyborg_now", "Now.")

def told():
    return {sample.name: sample.value for metric in metrics.collect_metrics() for sample in metric.samples
            if sample.name in ("cyborg_done_total", "cyborg_now")} | {"files": len(list(where.iterdir()))}

def children(count):
    # Each counts and says what it has now, then waits; what is told while they live, and after they are killed.
    ready_r, ready_w = os.pipe()
    pids = []
    for _ in range(count):
        if not (pid := os.fork()):
            done.labels("child").inc(10)
            now.set(1)
            os.write(ready_w, b"x")
            signal.pause()
        pids.append(pid)
    while count:
        count -= len(os.read(ready_r, count))
    alive = told()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [alive, told()]

done.labels("child").inc()
found = [children(3), children(3)]
metric_files.delete_files_of_dead_processes(where)
print(json.dumps([*found, told()]))
"""


@pytest.mark.slow
def test_counters_of_forked_processes_are_summed_and_kept_without_growing_the_files(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", COUNTING_PROGRAM],
        env=os.environ | {metric_files.FOLDER_VARIABLE: str(tmp_path / "metrics"), "CYBORG_STATE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, cleared = json.loads(finished.stdout)
    assert [told["cyborg_done_total"] for told in (*first, *second)] == [31, 31, 61, 61]
    assert [told["cyborg_now"] for told in (*first, *second)] == [3, 0, 3, 0]
    assert first[1]["files"] == second[1]["files"], "a process that is gone leaves its files to the next"
    assert cleared["cyborg_done_total"] == 1, "what the living one counted"


FAILING_PROGRAM = """
import os
from contextlib import suppress
from accelerators.runtime import metric_files, metrics
where = metric_files.metrics_folder()
metrics.create_gauge("cyborg_now", "Now.").set(1)
room = {file.name: file.stat().st_blocks * 512 for file in where.glob("*.db")}
assert len(room) == 3 and min(room.values()) >= metric_files.PREALLOCATED_BYTES, room
where.rename(where.with_name("away"))
where.write_text("no folder")
for counts in (True, False):
    if not (pid := os.fork()):
        mine = []
        for _ in range(2):
            if counts:
                metrics.record_merge(0.1, 1, 1)
                metrics._bind_answer_seconds.labels("new").observe(0.1)
            else:
                with suppress(OSError):
                    metric_files.acquire_process_number()
            mine = mine or [os.open("/", os.O_RDONLY)]
        os._exit(not all(os.fstat(one) for one in mine))
    assert os.waitpid(pid, 0)[1] == 0, counts
"""


@pytest.mark.slow
def test_a_fork_without_metric_files_continues_and_logs_it_once(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", FAILING_PROGRAM],
        env=os.environ | {metric_files.FOLDER_VARIABLE: str(tmp_path / "metrics"), "CYBORG_STATE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("records no metrics") == 1


@pytest.mark.slow
def test_with_an_unusable_metrics_folder_counters_stay_in_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    count = "metrics.create_counter('a_total', 'A.').inc(); print(len(list(metrics.collect_metrics())) > 0)"
    code = f"from accelerators.runtime import metrics; {count}"
    environ = os.environ | {metric_files.FOLDER_VARIABLE: str(tmp_path / "file")}
    said = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout == "True\n" and metric_files.FOLDER_VARIABLE in said.stderr


@pytest.mark.system
def test_agents_cli_and_supervisor_do_not_import_prometheus_client() -> None:
    modules = "agents.host.main, cyborgweb.cli.main, cyborgweb.server.supervisor, placement_sync.agent_writer, sys"
    code = f"import {modules}; print('prometheus_client' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


def test_a_metrics_token_shorter_than_16_characters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYBORG_METRICS_TOKEN", "short")
    with pytest.raises(ConfigurationError, match="16 characters"):
        get_keys.__wrapped__()
