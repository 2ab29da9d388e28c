"""`manage.py device` as an operator uses it."""

from __future__ import annotations

import io
import json
import sys

import pytest
from django.core.management import CommandError, call_command

from accelerators.devices import admission_rules, lifecycle
from accelerators.domain.caller import Caller
from accelerators.models import Device, Event
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def inventory() -> None:
    """Three cards, found."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1), make_card(2), make_card(3)))


def run_device_command(*arguments: str) -> tuple[int, str]:
    """Exit status and standard output."""
    out, status = io.StringIO(), 0
    try:
        call_command("device", *arguments, stdout=out, stderr=io.StringIO())
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, out.getvalue()


def list_device_uuids() -> list[str]:
    return [str(uuid) for uuid in Device.objects.order_by("id").values_list("uuid", flat=True)]


def test_list_prints_a_table_or_json_and_filters_devices() -> None:
    head, *lines = run_device_command("list", "--host", "cmp1", "--state", "inactive")[1].splitlines()
    assert head.split()[:3] == ["uuid", "state", "status"]
    assert [line.split()[:2] for line in lines] == [[uuid, "inactive"] for uuid in list_device_uuids()]
    assert [row["address"] for row in json.loads(run_device_command("list", "--json")[1])] == [
        f"0000:0{n}:00.0" for n in (1, 2, 3)
    ]
    assert run_device_command("list", "--state", "ready", "--quiet") == (0, "")


def test_an_action_moves_every_named_device_and_a_refusal_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "SLICE_SIZE", 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(list_device_uuids())))
    assert run_device_command("enable", "-", "--reason", "burnt in")[0] == 0
    assert Device.objects.filter(state="ready", state_reason="burnt in").count() == 3
    assert Event.objects.filter(action="device.ready", source="person").count() == 3
    first, second, third = list_device_uuids()
    assert run_device_command("disable", first)[0] == 0
    status, out = run_device_command("retire", first, second, "00000000-0000-4000-8000-000000000000", "--json")
    assert status == 1
    rows = json.loads(out)
    results = {row["uuid"]: (row["outcome"], row["reason"]) for row in rows}
    assert [*results.values()] == [("moved", None), ("refused", "conflict"), ("refused", "unknown")]
    assert [rows[2][column] for column in ("name", "host", "state")] == ["", "", ""], "it is not there"
    assert run_device_command("drain", third, "--then", "retired")[0] == 0
    assert [*Device.objects.order_by("id").values_list("state", flat=True)] == ["retired", "ready", "retired"]


def test_show_prints_a_devices_facts_actions_and_events() -> None:
    run_device_command("quarantine", list_device_uuids()[0], "--reason", "smoke")
    out = run_device_command("show", list_device_uuids()[0])[1]
    for fact in ("state              quarantined", "release, retire", "smoke", "device.found", "device.quarantined"):
        assert fact in out
    assert json.loads(run_device_command("show", list_device_uuids()[0], "--json")[1])["events"][0]["why"] == "smoke"


def test_admit_applies_the_admission_rules_and_dry_run_only_counts() -> None:
    admission_rules.create_rule({"name": "all", "action": "ready"}, Caller("olga", "", frozenset(), ""))
    assert json.loads(run_device_command("admit", "--dry-run", "--json")[1]) == [{"rule": "all", "devices": 3}]
    assert Device.objects.filter(state="ready").count() == 0
    run_device_command("admit")
    assert Device.objects.filter(state="ready").count() == 3


def test_unknown_devices_and_malformed_uuids_are_refused_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("nonsense"))
    with pytest.raises(CommandError, match="there is no device"):
        run_device_command("show", "00000000-0000-4000-8000-000000000000")
    with pytest.raises(CommandError, match="'nonsense' on standard input is not a uuid"):
        run_device_command("enable", "-")
    assert run_device_command("enable", "x")[0] == 2
    assert "'x' is not a uuid; `manage.py device list` shows the uuids" in capsys.readouterr().err
