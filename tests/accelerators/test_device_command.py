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
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def inventory() -> None:
    """Three cards, found."""
    apply(a_host(), answer(card(1), card(2), card(3)))


def said(*words: str) -> tuple[int, str]:
    """Exit status and standard output."""
    out, status = io.StringIO(), 0
    try:
        call_command("device", *words, stdout=out, stderr=io.StringIO())
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, out.getvalue()


def uuids() -> list[str]:
    return [str(uuid) for uuid in Device.objects.order_by("id").values_list("uuid", flat=True)]


def test_what_there_is_is_listed_for_people_and_for_scripts() -> None:
    head, *lines = said("list", "--host", "cmp1", "--state", "inactive")[1].splitlines()
    assert head.split()[:3] == ["uuid", "state", "status"]
    assert [line.split()[:2] for line in lines] == [[uuid, "inactive"] for uuid in uuids()]
    assert [row["address"] for row in json.loads(said("list", "--json")[1])] == [f"0000:0{n}:00.0" for n in (1, 2, 3)]
    assert said("list", "--state", "ready", "--quiet") == (0, "")


def test_it_is_done_to_all_that_are_named_and_what_is_refused_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "SLICE_SIZE", 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(uuids())))
    assert said("enable", "-", "--reason", "burnt in")[0] == 0
    assert Device.objects.filter(state="ready", state_reason="burnt in").count() == 3
    assert Event.objects.filter(action="device.ready", source="person").count() == 3
    first, second, third = uuids()
    assert said("disable", first)[0] == 0
    status, out = said("retire", first, second, "00000000-0000-4000-8000-000000000000", "--json")
    assert status == 1
    rows = json.loads(out)
    results = {row["uuid"]: (row["outcome"], row["reason"]) for row in rows}
    assert [*results.values()] == [("moved", None), ("refused", "conflict"), ("refused", "unknown")]
    assert [rows[2][column] for column in ("name", "host", "state")] == ["", "", ""], "it is not there"
    assert said("drain", third, "--then", "retired")[0] == 0
    assert [*Device.objects.order_by("id").values_list("state", flat=True)] == ["retired", "ready", "retired"]


def test_one_device_is_shown_with_what_happened_to_it() -> None:
    said("quarantine", uuids()[0], "--reason", "smoke")
    out = said("show", uuids()[0])[1]
    for fact in ("state              quarantined", "release, retire", "smoke", "device.found", "device.quarantined"):
        assert fact in out
    assert json.loads(said("show", uuids()[0], "--json")[1])["events"][0]["why"] == "smoke"


def test_rules_are_applied_from_here_too() -> None:
    admission_rules.create_rule({"name": "all", "action": "ready"}, Caller("olga", "", frozenset(), ""))
    assert json.loads(said("admit", "--dry-run", "--json")[1]) == [{"rule": "all", "devices": 3}]
    assert Device.objects.filter(state="ready").count() == 0
    said("admit")
    assert Device.objects.filter(state="ready").count() == 3


def test_bad_words_are_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("nonsense"))
    with pytest.raises(CommandError, match="there is no device"):
        said("show", "00000000-0000-4000-8000-000000000000")
    with pytest.raises(CommandError, match="'nonsense' on standard input is not a uuid"):
        said("enable", "-")
    assert said("enable", "x")[0] == 2
    assert "'x' is not a uuid; `manage.py device list` shows the uuids" in capsys.readouterr().err
