"""Test `/metrics`, the alert rules and the dashboard with Prometheus itself, and its tool promtool."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from django.conf import settings
from django.test import Client

from agents import telemetry
from cyborgweb.monitoring import page
from tests.cyborgweb.monitoring.test_metrics_documented import DOCS, list_queries
from tests.support.reports import create_heard_host
from tests.support.requests import bind_new_requests, create_profiles, offer_devices
from tests.support.webserver import until
from tests.system.simulated import PROMETHEUS, PROMTOOL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        not (PROMTOOL.exists() and PROMETHEUS.exists()), reason="there is no Prometheus in .sim (make deps-sim)"
    ),
]
LOADS = {
    "utilization_percent": 40.0,
    "memory_used_bytes": 2.0**30,
    "memory_total_bytes": 2.0**31,
    "temperature_celsius": 61.0,
    "temperature_celsius_1": 71.0,
    "power_watts": 75.0,
    "energy_joules_total": 9000.0,
    "busy_seconds_total": 12.0,
    "errors_fatal_total": 1.0,
    "errors_correctable_total": 2.0,
}
DEPRECATED = ("cyborg_device_load",)


@pytest.fixture
def scraped(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return `/metrics` with everything switched on, of a host with devices, of which one is held."""
    host = create_heard_host("cmp1", 2)
    offer_devices()
    create_profiles(plain={})
    deployable = host.devices.order_by("id")[0].deployables.get()
    bind_new_requests("plain", str(deployable.rp_uuid))
    now = {key: LOADS for key in host.devices.values_list("key", flat=True)}
    snapshot = telemetry.LoadSnapshot({host.pk: telemetry.HostLoad(host.pk, time.time(), now)})
    monkeypatch.setattr(telemetry, "get_last_loads", lambda: snapshot)
    keys = replace(settings.KEYS, metrics_devices=True, metrics_units=("class", "host", "project"))
    monkeypatch.setattr(settings, "KEYS", keys)
    page.metrics_cache.clear()
    text = Client().get("/metrics").content.decode()
    page.metrics_cache.clear()
    return text


def find_value(text: str, name: str, **labels: str) -> float:
    """Return the value of the only series of this name with these labels."""
    lines = [line for line in text.splitlines() if re.match(rf"{name}[{{ ]", line)]
    (found,) = (line for line in lines if all(f'{key}="{value}"' in line for key, value in labels.items()))
    return float(found.rpartition(" ")[2])


def run_promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool with this text as its input."""
    command = [str(PROMTOOL), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_promtool_finds_no_fault_in_the_names_and_units_of_metrics(scraped: str) -> None:
    text = "\n".join(line for line in scraped.splitlines() if not any(name in line for name in DEPRECATED)) + "\n"
    checked = run_promtool("check", "metrics", text=text)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_promtool_accepts_the_alert_rules() -> None:
    rules = str(DOCS / "monitoring/alerts.yaml")
    checked = run_promtool("check", "rules", rules)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_loads_and_units_have_one_quantity_a_name_in_base_units(scraped: str) -> None:
    device = re.search(r'cyborg_device_power_watts\{device="([^"]+)"', scraped) or pytest.fail("no power")
    own = {"device": device[1], "host": "cmp1", "type": "FPGA"}
    assert find_value(scraped, "cyborg_device_utilization_ratio", **own) == 0.4
    assert find_value(scraped, "cyborg_device_temperature_celsius", sensor="1", **own) == 71
    assert find_value(scraped, "cyborg_device_errors_total", severity="fatal", **own) == 1
    assert find_value(scraped, "cyborg_units", resource_class="FPGA", type="FPGA", state="held") == 1
    assert find_value(scraped, "cyborg_units", resource_class="FPGA", type="FPGA", state="free") == 3
    assert find_value(scraped, "cyborg_host_units", host="cmp1", state="free") == 3
    assert find_value(scraped, "cyborg_project_units_held", project="p1", resource_class="FPGA") == 1
    assert find_value(scraped, "cyborg_units_truncated", by="host") == 0


def test_hosts_and_projects_are_exported_only_if_they_are_switched_on(db: None) -> None:
    create_heard_host("cmp1", 2)
    page.metrics_cache.clear()
    text = Client().get("/metrics").content.decode()
    assert "\ncyborg_units{" in text
    assert "\ncyborg_host_units{" not in text and "\ncyborg_project_units_held{" not in text


class _Target(BaseHTTPRequestHandler):
    """Answer every request with the text of the server's scrape."""

    def do_GET(self) -> None:
        body = self.server.scrape.encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def prometheus(scraped: str, tmp_path: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes this text and evaluates the alert rules; yield its address."""
    target = ThreadingHTTPServer(("127.0.0.1", 0), _Target)
    target.scrape = scraped  # type: ignore[attr-defined]
    Thread(target=target.serve_forever, daemon=True).start()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Target) as unused:
        port = unused.server_port
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DOCS / "monitoring/alerts.yaml")],
        "scrape_configs": [
            {"job_name": "accelerators", "static_configs": [{"targets": [f"127.0.0.1:{target.server_port}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    options = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    command = [str(PROMETHEUS), f"--config.file={tmp_path / 'prometheus.yml'}", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)
        target.shutdown()
        target.server_close()


def ask(address: str, path: str, **parameters: str) -> Any:
    """Return the data of Prometheus' answer, None while it does not answer. Fails if it refuses the query."""
    try:
        with urllib.request.urlopen(f"{address}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is starting
            return None
        pytest.fail(f"{parameters}: {error.read().decode()}")
    except OSError:
        return None


def test_prometheus_answers_every_query_of_the_dashboard_and_evaluates_every_alert_rule(prometheus: str) -> None:
    def scraped_twice() -> bool:
        data = ask(prometheus, "/api/v1/query", query="count_over_time(cyborg_build_info[1m]) >= 3")
        return bool(data and data["result"])

    until(scraped_twice, 30)
    answered = {}
    for title, query in list_queries():
        if query.startswith("label_values"):
            continue
        filled = query.replace("$__rate_interval", "1m").replace('"$job"', '".*"').replace('"$host"', '".*"')
        answered[title, query] = ask(prometheus, "/api/v1/query", query=filled)["result"]
    for quantity in ("utilization_ratio", "memory_used_bytes", "temperature_celsius", "power_watts", "energy_joules"):
        assert all(result for (_, query), result in answered.items() if f"cyborg_device_{quantity}" in query), quantity
    for metric in ("cyborg_host_units", "cyborg_project_units_held", "cyborg_agents", "cyborg_devices{"):
        assert any(result for (_, query), result in answered.items() if metric in query), metric
    rules = [rule for group in ask(prometheus, "/api/v1/rules")["groups"] for rule in group["rules"]]
    until(
        lambda: all(
            rule["health"] == "ok" for group in ask(prometheus, "/api/v1/rules")["groups"] for rule in group["rules"]
        ),
        30,
    )
    assert len(rules) > 20
