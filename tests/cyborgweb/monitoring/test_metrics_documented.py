"""Test the manual's page of metrics, the dashboard and the alert rules: every metric that they name exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.conf import settings

from accelerators.runtime import metrics
from agents.gateway import metrics as gateways_meters  # noqa: F401 imported to register their metrics
from cyborgweb.live import feed  # noqa: F401
from cyborgweb.monitoring import calls, served, snapshot  # noqa: F401

DOCS = Path(__file__).resolve().parents[3] / "docs"
DASHBOARD = json.loads((DOCS / "monitoring/grafana-dashboard.json").read_text())
ALERT_RULES = [
    rule for group in yaml.safe_load((DOCS / "monitoring/alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
METRIC_SELECTOR = re.compile(r"(cyborg_\w+)(?:\{([^}]*)\})?")


@pytest.fixture
def described_metrics(db: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return every metric by name, with its type, its labels and its description."""
    monkeypatch.setattr(settings, "KEYS", replace(settings.KEYS, metrics_devices=True))
    found: dict[str, Any] = {}
    for meter in [*metrics.REGISTRY._collector_to_names, *snapshot.collect_gauges()]:
        (described,) = meter.describe() if hasattr(meter, "describe") else (meter,)
        name = described.name + ("_total" if described.type == "counter" else "")
        found[name] = (described.type, tuple(getattr(meter, "_labelnames", ())), described.documentation)
    return found


def list_sample_labels(described_metrics: dict[str, Any]) -> dict[str, set[str]]:
    """Return every name that a query may use, with the labels that it may select by."""
    found: dict[str, set[str]] = {}
    for name, (kind, labels, _) in described_metrics.items():
        for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found[name + suffix] = {*labels, "job", "instance"} | ({"le"} if suffix == "_bucket" else set())
    return found


def list_queries() -> Iterator[tuple[str, str]]:
    """Yield every query of the dashboard and of the alert rules, each with the title of its panel, variable or rule."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for rule in ALERT_RULES:
        yield rule["alert"], rule["expr"]


def test_the_manual_lists_every_metric_with_its_type_labels_and_description(described_metrics: dict[str, Any]) -> None:
    rows = [
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |"
        for name, (kind, labels, text) in described_metrics.items()
    ]
    written = re.findall(r"^\| `cyborg_.*\|$", (DOCS / "monitoring.md").read_text(), re.MULTILINE)
    assert sorted(written) == sorted(rows), "\n".join(sorted(rows))


def test_dashboard_and_alert_rules_query_only_existing_metrics_and_labels(described_metrics: dict[str, Any]) -> None:
    known = list_sample_labels(described_metrics)
    for where, query in list_queries():
        found = METRIC_SELECTOR.findall(query)
        assert found, where
        for name, matchers in found:
            assert name in known, f"{where}: {name}"
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= known[name], f"{where}: {query}"


def test_every_metric_is_used_by_the_dashboard_or_an_alert_rule(described_metrics: dict[str, Any]) -> None:
    asked = " ".join(query for _, query in list_queries())
    names = described_metrics.keys() - {"cyborg_device_load"}  # deprecated
    assert not [name for name in names if not re.search(rf"{name}\b|{name}_(?:bucket|count|sum)\b", asked)]


def test_every_alert_rule_has_a_severity_a_summary_and_an_action() -> None:
    assert len({rule["alert"] for rule in ALERT_RULES}) == len(ALERT_RULES)
    for rule in ALERT_RULES:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert all(rule["annotations"][said].rstrip().endswith(".") for said in ("summary", "action")), rule["alert"]


def test_every_dashboard_panel_uses_the_chosen_data_source() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in panels:
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}, panel["title"]
