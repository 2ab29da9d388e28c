"""`manage.py command` and `manage.py device enable --wait` as an operator uses them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from accelerators.commands import placing
from accelerators.management import following
from accelerators.models import Command, Device, Event
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.workflows import command_results
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db

ACTS = "attach detach health partition program reset uninstall"
IMAGE = "11111111-2222-4333-8444-555555555555"


@pytest.fixture(autouse=True)
def device() -> Device:
    """A card that has to be installed, and can do everything."""
    apply_report(
        get_or_create_host(),
        make_driver_report(make_card(1, acts=ACTS, to_install="make 4 virtual functions"), make_card(2)),
    )
    return Device.objects.get(address="0000:01:00.0")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`agent(outcome, text, **detail)`: whenever somebody waits, one step is done; in the end it answers so."""

    def plays(outcome: str = "succeeded", text: str = "done", **detail: str) -> None:
        def step(seconds: float) -> None:
            command = Command.objects.filter(COMMAND_IS_OPEN).first()
            if command.percent < 50:
                placing.store_progress([placing.CommandProgress(command.host_id, command.id, 50, "half of it")])
                return
            placing.store_answers([placing.CommandAnswer(command.host_id, command.id, outcome, text, detail)])
            command_results.end_answered_commands()

        monkeypatch.setattr(following.time, "sleep", step)

    return plays


class TerminalOutput(io.StringIO):
    """Where a bar is drawn."""

    def isatty(self) -> bool:
        return True


def run_command(*arguments: str, terminal: bool = False) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    out, err, status = io.StringIO(), TerminalOutput() if terminal else io.StringIO(), 0
    try:
        call_command(*arguments, stdout=out, stderr=err)
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, out.getvalue(), err.getvalue()


def test_a_command_is_ordered_and_can_be_followed_later_with_show_wait(
    device: Device, agent: Callable[..., None]
) -> None:
    status, out, _ = run_command("command", "health", str(device.uuid), "--reason", "looks ill")
    command = Command.objects.get()
    assert status == 0 and out.startswith(f"ordered: {command.uuid}; ")
    assert Event.objects.get(action="command.ordered").source == "person" and command.reason == "looks ill"
    assert run_command("command", "show", str(command.uuid))[1] == "queued: 0 %\n"
    agent("succeeded", "it is well", temperature="41 °C")
    status, out, err = run_command("command", "show", str(command.uuid), "--wait")
    assert (status, out.splitlines()) == (0, ["succeeded: it is well", "temperature: 41 °C"])
    name = "health 1044 0000:01:00.0"
    assert err.splitlines() == [f"{name}: queued", f"{name}: started 50 % half of it", f"{name}: succeeded 100 %"]


def test_waiting_shows_a_bar_on_a_terminal_and_ends_with_1_if_it_failed(
    device: Device, agent: Callable[..., None]
) -> None:
    agent("failed", "no memory for them")
    words = ("command", "partition", str(device.uuid), "--layout", "vfs=4", "size=2", "--wait")
    status, out, err = run_command(*words, terminal=True)
    assert (status, out) == (1, "failed: no memory for them\n")
    assert Command.objects.get().arguments["layout"] == {"vfs": "4", "size": "2"}
    assert "[############            ]  50 % half of it" in err and err.count("\r") == 3 and err.endswith("failed\n")


def test_json_output_of_ordering_and_listing_commands(device: Device, agent: Callable[..., None]) -> None:
    agent(log="line\nline")
    status, out, _ = run_command("command", "logs", "cmp1", "--wait", "--json")
    shown_command = json.loads(out)
    assert (status, shown_command["op"], shown_command["state"], shown_command["detail"]) == (
        0,
        "logs",
        "succeeded",
        {"log": "line\nline"},
    )
    assert json.loads(run_command("command", "rescan", "cmp1", "--driver", "d", "--json")[1])["state"] == "queued"
    rows = json.loads(run_command("command", "list", "--host", "cmp1", "--json")[1])
    assert [row["op"] for row in rows] == ["rescan", "logs"]
    assert [row["op"] for row in json.loads(run_command("command", "list", "--open", "--json")[1])] == ["rescan"]
    head, line, *_ = run_command("command", "list")[1].splitlines()
    assert head.split()[:3] == ["uuid", "state", "%"] and line.split()[1:4] == ["queued", "0", "rescan"]


def test_a_program_command_stores_the_image_that_it_wants(device: Device) -> None:
    run_command("command", "program", str(device.uuid), "--image", IMAGE)
    assert Command.objects.get().arguments["wanted"] == {"bitstream_id": IMAGE}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("health", "00000000-0000-4000-8000-000000000000"), "Device not found"),
        (("logs", "nowhere"), "there is no host 'nowhere'"),
        (("logs", "00000000-0000-4000-8000-000000000000"), "Host not found"),
        (("partition", "DEVICE", "--layout", "vfs"), "words of the driver such as vfs=4"),
        (("health", "DEVICE", "--reason", "x" * 501), "at most 500 characters"),
        (("show", "00000000-0000-4000-8000-000000000000"), "there is no command"),
    ],
)
def test_refused_orders_print_the_reason(device: Device, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        run_command("command", *(str(device.uuid) if word == "DEVICE" else word for word in words))


def test_interrupting_the_wait_says_that_the_command_continues(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(following.time, "sleep", stop)
    with pytest.raises(CommandError, match="the ordered commands continue"):
        run_command("command", "reset", str(device.uuid), "--wait")
    assert Command.objects.filter(COMMAND_IS_OPEN).count() == 1


@pytest.mark.parametrize(("outcome", "status", "state"), [("succeeded", 0, "ready"), ("failed", 1, "failed")])
def test_device_enable_with_wait_reports_the_final_states(
    agent: Callable[..., None], outcome: str, status: int, state: str
) -> None:
    agent(outcome, "so it went")
    uuids = [str(uuid) for uuid in Device.objects.order_by("id").values_list("uuid", flat=True)]
    ended, out, _ = run_command("device", "enable", *uuids, "--wait", "--json")
    rows: list[dict[str, Any]] = json.loads(out)
    assert ended == status
    assert [(row["state"], row["text"]) for row in rows] == [(state, "so it went"), ("ready", "")]
    assert "install" in run_command("device", "show", uuids[0])[1]
