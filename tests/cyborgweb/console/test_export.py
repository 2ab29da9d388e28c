"""Test the export of a list: exactly the filtered rows, no spreadsheet formulas, an event, and permissions."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import orjson
import pytest
import yaml
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.signals import request_finished
from django.db import close_old_connections
from django.test import Client, RequestFactory
from django.urls import reverse

from accelerators.models import Device, Event
from accelerators.ui import export
from accelerators.ui.changelist import ConsoleModelAdmin
from cyborgweb.models import Maintenance
from tests.cyborgweb.console.conftest import Fill, fill_other_lists
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db

DEVICES = "/admin/accelerators/device/export."


def download(client: Client, path: str, **query: str) -> str:
    answered = client.get(path, query)
    assert answered.status_code == 200
    return b"".join(answered.streaming_content).decode()


def close_unread(response: Any) -> None:
    """Close an answer that was not read, twice as some servers do. The test's database connection stays open."""
    request_finished.disconnect(close_old_connections)
    response.close()
    response.close()
    request_finished.connect(close_old_connections)


def parse_csv(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_all_export_formats_contain_the_same_filtered_rows(operator: Client, fill: Fill) -> None:
    fill(23)
    asked = {"state__exact": "inactive", "q": "cmp1", "columns": "state,address,since"}
    one = parse_csv(download(operator, f"{DEVICES}csv", **asked))
    two, *others = (read(download(operator, f"{DEVICES}{form}", **asked)) for form, read in PARSERS_BY_FORMAT)
    wanted = Device.objects.filter(state="inactive", host__name="cmp1.example").order_by("host_id", "key")
    assert [row["uuid"] for row in one] == [str(device.uuid) for device in wanted] != []
    assert list(one[0]) == ["uuid", "state", "state_reason", "drain_to", "address", "key", "state_since"]
    assert others == [two, two]
    assert [{name: value or "" for name, value in row.items()} for row in two] == one


def parse_json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


PARSERS_BY_FORMAT = (("json", json.loads), ("jsonl", parse_json_lines), ("yaml", yaml.safe_load))


def test_a_long_export_is_streamed_in_slices_without_losing_rows(
    operator: Client, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(23)
    monkeypatch.setattr(export, "ROWS_PER_CHUNK", 5)
    answered = operator.get(f"{DEVICES}json")
    pieces = list(answered.streaming_content)
    assert len(pieces) == 6
    assert len({row["uuid"] for row in json.loads(b"".join(pieces))}) == 23
    for form, read in PARSERS_BY_FORMAT:
        assert read(download(operator, f"{DEVICES}{form}", q="nothing")) == []


def test_exported_csv_values_cannot_be_spreadsheet_formulas(operator: Client) -> None:
    apply_report(
        get_or_create_host(),
        make_driver_report(make_card(1, model="=HYPERLINK(1)", vendor="@SUM(1)", status="ok", status_reason="x;=2+3")),
    )
    text = download(operator, f"{DEVICES}csv")
    (row,) = parse_csv(text)
    assert (row["model"], row["vendor"], row["status_reason"]) == ("'=HYPERLINK(1)", "'@SUM(1)", "x;'=2+3")
    heading, line = text.splitlines()
    assert heading.count('"') == line.count('"') == 2 * len(row), "every cell is quoted"
    assert not any(cell.startswith("=") for cell in line.split(";")), "for a spreadsheet with semicolons"


def test_an_export_is_recorded_as_an_event_with_actor_filters_and_row_count(operator: Client, fill: Fill) -> None:
    fill(13)
    download(operator, f"{DEVICES}csv", q="cmp1")
    event = Event.objects.get(action="list.exported")
    assert (event.actor, event.source, event.subject_name) == ("olga", "person", "devices")
    assert event.changes == {"rows": [None, 3], "as": [None, "csv"], "only": [None, "q=cmp1"]}


def test_exports_need_the_view_permission_and_too_many_at_once_are_answered_503(client: Client, fill: Fill) -> None:
    user = User.objects.create(username="viewer", is_staff=True)
    client.force_login(user)
    assert client.get(f"{DEVICES}csv").status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="view_device"))
    open_ones = [client.get(f"{DEVICES}csv") for _ in range(export.MAX_CONCURRENT_EXPORTS)]
    busy = client.get(f"{DEVICES}csv")
    assert (busy.status_code, busy["Retry-After"]) == (503, "10")
    for answered in open_ones:
        close_unread(answered)
    download(client, f"{DEVICES}csv")
    client.logout()
    assert client.get(f"{DEVICES}csv").status_code == 302


@pytest.mark.parametrize("asked", ["csv?columns=nonsense", "csv?state__exact=%00", "json?columns="])
def test_exports_with_invalid_columns_filters_or_formats_are_refused(asked: str, operator: Client) -> None:
    assert operator.get(f"{DEVICES}{asked}").status_code == 400
    assert operator.get(f"{DEVICES}exe").status_code == 404


def exported_lists() -> list[ConsoleModelAdmin]:
    """Return the console's lists that can be exported."""
    return [one for one in admin.site._registry.values() if isinstance(one, ConsoleModelAdmin)]


@pytest.mark.slow
def test_every_list_can_be_exported_with_its_stored_rows_and_values(
    operator: Client, fill: Fill, rf: RequestFactory
) -> None:
    fill_other_lists(fill(13))
    Maintenance.objects.create(id=1, by="olga", reason="an upgrade")
    request = rf.get("/")
    request.user = User.objects.get()
    lists = exported_lists()
    assert {"accelerators.device", "accelerators.command", "placement_sync.tree"} < {
        one.opts.label_lower for one in lists
    }
    for one in lists:
        stored_names = {field.name for field in one.opts.get_fields()}
        paths = [
            path
            for path in export.list_export_columns(one, request)
            if isinstance(path, str) and path.split("__")[0] in stored_names
        ]
        names = [path.replace("__", "_") for path in paths]
        assert names, one.opts.label_lower
        stored = [dict(zip(names, row, strict=True)) for row in one.model._default_manager.values_list(*paths)]
        before, count = Event.objects.count(), one.model._default_manager.count()
        rows = json.loads(
            download(operator, reverse(f"admin:{one.opts.app_label}_{one.opts.model_name}_export", args=["json"]))
        )
        assert len(rows) == count > 0, one.opts.label_lower
        assert sorted(as_text({name: row[name] for name in names}) for row in rows) == sorted(map(as_text, stored))
        assert all(has_values(row) for row in rows), one.opts.label_lower
        assert Event.objects.count() == before + 1


def as_text(row: dict[str, Any]) -> str:
    """Return a row as text in a fixed order; values without a JSON form are written as the export writes them."""
    return orjson.dumps(row, default=str, option=orjson.OPT_SORT_KEYS).decode()


def has_values(row: dict[str, Any]) -> bool:
    """Return True if a row has any value besides its identity."""
    return any(value not in (None, "", [], {}) for name, value in row.items() if name not in ("uuid", "id"))
