"""The page, the dashboard and the alert rules against the code: each name in them is a metric that is told."""

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
from agents.gateway import metrics as gateways_meters  # noqa: F401 all that count are loaded
from cyborgweb.live import feed  # noqa: F401
from cyborgweb.monitoring import calls, served, snapshot  # noqa: F401

DOCS = Path(__file__).resolve().parents[2] / "docs"
BOARD = json.loads((DOCS / "monitoring/grafana-dashboard.json").read_text())
RULES = [
    rule for group in yaml.safe_load((DOCS / "monitoring/alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
SELECTED = re.compile(r"(cyborg_\w+)(?:\{([^}]*)\})?")


@pytest.fixture
def told(db: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every metric there is, with its labels, by name."""
    monkeypatch.setattr(settings, "KEYS", replace(settings.KEYS, metrics_devices=True))
    found: dict[str, Any] = {}
    for meter in [*metrics.REGISTRY._collector_to_names, *snapshot.collect_gauges()]:
        (described,) = meter.describe() if hasattr(meter, "describe") else (meter,)
        name = described.name + ("_total" if described.type == "counter" else "")
        found[name] = (described.type, tuple(getattr(meter, "_labelnames", ())), described.documentation)
    return found


def samples(told: dict[str, Any]) -> dict[str, set[str]]:
    """What a query may name, with the labels it may choose by."""
    found: dict[str, set[str]] = {}
    for name, (kind, labels, _) in told.items():
        for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found[name + suffix] = {*labels, "job", "instance"} | ({"le"} if suffix == "_bucket" else set())
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Every query of the dashboard and of the rules, with where it stands."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def test_every_metric_stands_in_the_manual_as_the_code_says_it(told: dict[str, Any]) -> None:
    rows = [
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |"
        for name, (kind, labels, text) in told.items()
    ]
    written = re.findall(r"^\| `cyborg_.*\|$", (DOCS / "monitoring.md").read_text(), re.MULTILINE)
    assert sorted(written) == sorted(rows), "\n".join(sorted(rows))


def test_dashboard_and_rules_ask_for_what_there_is(told: dict[str, Any]) -> None:
    known = samples(told)
    for where, query in queries():
        found = SELECTED.findall(query)
        assert found, where
        for name, matchers in found:
            assert name in known, f"{where}: {name}"
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= known[name], f"{where}: {query}"


def test_every_metric_is_on_the_dashboard_or_in_a_rule(told: dict[str, Any]) -> None:
    asked = " ".join(query for _, query in queries())
    assert not [name for name in told if not re.search(rf"{name}\b|{name}_(?:bucket|count|sum)\b", asked)]


def test_every_rule_says_what_is_wrong_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert all(rule["annotations"][said].rstrip().endswith(".") for said in ("summary", "action")), rule["alert"]


def test_every_panel_is_drawn_from_the_chosen_source() -> None:
    panels = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in panels:
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}, panel["title"]
