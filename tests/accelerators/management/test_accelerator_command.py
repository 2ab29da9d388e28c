"""`manage.py accelerator` as an operator uses it."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import CommandError, call_command

from accelerators.commands import placing
from accelerators.management import following
from accelerators.models import AttachHandle, Command
from accelerators.workflows import command_results
from tests.accelerators.api.own.test_units import build_divisible_card, create_bound_request, get_device, report_cards

pytestmark = pytest.mark.django_db


def run_accelerator_command(*arguments: str) -> tuple[int, str]:
    """Exit status and standard output."""
    out, status = io.StringIO(), 0
    try:
        call_command("accelerator", *arguments, stdout=out, stderr=io.StringIO())
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, out.getvalue()


def test_list_shows_each_unit_with_its_state_instance_and_project() -> None:
    report_cards(build_divisible_card(1, 2), build_divisible_card(2, 1, "b"))
    held = create_bound_request(AttachHandle.objects.order_by("attach_info").first())
    head, *lines = run_accelerator_command("list")[1].splitlines()
    lines.sort()
    assert head.split() == ["state", "host", "driver", "backend", "device", "handle", "instance", "project", "label"]
    assert [line.split()[:4] for line in lines] == [
        ["Bound", "cmp1", "generic_driver", "a"],
        ["free", "cmp1", "generic_driver", "a"],
        ["free", "cmp1", "generic_driver", "b"],
    ]
    (row,) = json.loads(run_accelerator_command("list", "--attached", "--json")[1])
    assert (row["state"], row["instance"], row["project"]) == ("Bound", held.instance_uuid, "p1")
    assert (
        len(json.loads(run_accelerator_command("list", "--free", "--backend", "b", "--host", "cmp1", "--json")[1])) == 1
    )
    assert json.loads(run_accelerator_command("list", "--driver", "x", "--json")[1]) == []


def test_create_delete_and_update_order_partitions_and_report_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    report_cards(build_divisible_card(1, 2), build_divisible_card(2, 1, "b"))
    status, text = run_accelerator_command("create", "cmp1/a", "cmp1/z", "--count", "2", "--reason", "guests")
    ordered, refused = text.splitlines()
    command = Command.objects.get()
    assert (status, command.arguments["layout"], command.reason) == (1, {"vfs": "4"}, "guests")
    assert ordered.startswith(f"ordered: {command.uuid}") and refused.startswith("refused: Host cmp1 has no device")
    other = str(get_device(2).uuid)
    status, text = run_accelerator_command("delete", other, "--json")
    (row,) = json.loads(text)
    assert (status, row["command"]["op"], row["refused"]) == (0, "partition", "")
    with pytest.raises(CommandError, match="is at generation 1 now, not 0"):
        run_accelerator_command("update", other, "--layout", "vfs=3", "--generation", "0")
    with pytest.raises(CommandError, match="1 or more"):
        run_accelerator_command("create", other, "--count", "0")
    assert run_accelerator_command("delete", "cmp1")[0] == 2, "no uuid, and no HOST/BACKEND either"


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_update_with_wait_prints_the_outcome_and_exits_with_its_status(
    outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_cards(build_divisible_card(1, 2))

    def agent(_: float) -> None:
        command = Command.objects.get()
        placing.store_answers([placing.CommandAnswer(command.host_id, command.id, outcome, "as its driver says")])
        command_results.end_answered_commands()

    monkeypatch.setattr(following.time, "sleep", agent)
    status, text = run_accelerator_command("update", str(get_device(1).uuid), "--layout", "vfs=3", "--wait")
    assert (status, text) == (outcome != "succeeded", f"1044 0000:01:00.0 on cmp1: {outcome}: as its driver says\n")
