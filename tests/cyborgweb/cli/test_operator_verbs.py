"""Test `manage.py device`, `driver`, `command` and `accelerator` as an operator uses them, and that they equal
`cyborg`."""

from __future__ import annotations

import getpass
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.catalogue import ORDERABLE_COMMANDS
from accelerators.devices import admission_rules, lifecycle
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.states import EventSource
from accelerators.models import AttachHandle, Attachment, Bulk, Command, Device, Event, Rollout
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.workflows import command_endings, driver_rollouts
from cyborgweb.auth import authentication, policy, read_only
from cyborgweb.cli import connection, device_commands
from cyborgweb.management.operator_verbs import SPELLINGS, VERBS
from cyborgweb.settings.keys import Keys
from drivers.inventory import DriverReport
from tests.accelerators.api.own.conftest import Fill, fill
from tests.accelerators.api.own.test_units import build_divisible_card, create_bound_request, get_device, report_cards
from tests.accelerators.workflows import test_rollouts
from tests.cyborgweb.cli.conftest import Cyborg
from tests.support.clocks import replace_sleep
from tests.support.manage import run_verb
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.usefixtures("agents_need_not_be_up")

__all__ = ["fill"]
UNKNOWN_UUID = "00000000-0000-4000-8000-000000000000"
IMAGE = "11111111-2222-4333-8444-555555555555"
ACTS = "attach detach health partition program reset uninstall"
uses_database = pytest.mark.django_db


def list_device_uuids() -> list[str]:
    """Return the uuids of all devices, the oldest first."""
    return [str(uuid) for uuid in Device.objects.order_by("id").values_list("uuid", flat=True)]


@pytest.fixture
def cards(db: None) -> list[str]:
    """Report three cards, and return their uuids."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1), make_card(2), make_card(3)))
    return list_device_uuids()


@pytest.fixture
def device(db: None) -> Device:
    """Report two cards and return the first: it has all acts and has to be installed; the other has not."""
    report = make_driver_report(make_card(1, acts=ACTS, to_install="make 4 virtual functions"), make_card(2))
    apply_report(get_or_create_host(), report)
    return Device.objects.get(address="0000:01:00.0")


Agent = Callable[..., None]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    """Return a function `agent(outcome, text, **detail)`. After its call, each wait of a verb carries out one step of
    the oldest open command; the last step answers with these values."""

    def play(outcome: str = "succeeded", text: str = "done", **detail: str) -> None:
        def step(seconds: float) -> None:
            command = Command.objects.filter(COMMAND_IS_OPEN).first()
            if command is None or command.op == "configure":
                if command is not None:
                    test_rollouts.answer_as_agent(command, outcome, text)
                driver_rollouts.advance_oldest_rollout()
            elif command.percent < 50:
                command_queue.store_progress(
                    [command_queue.CommandProgress(command.host_id, command.id, 50, "half of it")]
                )
            else:
                command_queue.store_answers(
                    [command_queue.CommandAnswer(command.host_id, command.id, outcome, text, detail)]
                )
                command_endings.end_answered_commands()

        replace_sleep(monkeypatch, step)

    return play


SAME_OUTPUT = {
    "device-list": ("--host", "cmp0", "--state", "inactive"),
    "device-show": ("cmp0/0000:00:00.0",),
    "device-ready": ("DEVICE", "--no-wait", "--yes"),
    "device-admit": ("--dry-run",),
    "device-maintain": ("DEVICE", UNKNOWN_UUID),
    "device-drain": ("DEVICE", "--then", "retired", "--yes"),
    "device-quarantine": ("DEVICE", "--yes"),
    "device-release": ("DEVICE", "--yes"),
    "device-retire": ("DEVICE", "--yes"),
    "device-reinstate": ("DEVICE", "--yes"),
    "driver-list": ("--host", "cmp0"),
    "install-driver": ("pci_driver", "--host", "nowhere"),
    "update-driver": ("pci_driver", "--all", "--enable"),
    "uninstall-driver": ("pci_driver", "--yes"),
    "rollout-show": (),
    "rollout-cancel": ("ROLLOUT",),
    "rollout-retry": (UNKNOWN_UUID,),
    "device-health": ("DEVICE", "--no-wait"),
    "device-reset": (UNKNOWN_UUID,),
    "device-partition": ("DEVICE", "--layout", "vfs=2"),
    "device-program": ("DEVICE", "--image", "no uuid"),
    "device-uninstall": ("DEVICE",),
    "host-remove": ("cmp0", "--dry-run"),
    "host-removal-cancel": ("cmp0",),
    "host-rescan": ("nowhere",),
    "host-logs": (UNKNOWN_UUID,),
    "host-report": ("cmp0", "--no-wait", "--driver", "x" * 65),
    "command-list": ("--host", "cmp0", "--open"),
    "command-show": ("COMMAND",),
    "bulk-show": (),
    "bulk-cancel": (UNKNOWN_UUID,),
    "attach-instance": (UNKNOWN_UUID, "--profile", "none"),
    "attachment-detach": ("ATTACHMENT", "--yes", "--no-wait"),
    "attachment-list": ("--state", "asked"),
    "attachment-show": ("ATTACHMENT",),
    "accelerator-list": ("--host", "cmp0", "--all"),
    "accelerator-create": ("cmp0/nics", "DEVICE", "--count", "2"),
    "accelerator-delete": ("DEVICE", "--yes", "--no-wait"),
    "accelerator-update": ("DEVICE", "--layout", "vfs=3"),
    "accelerator-label": ("--filter", "host=cmp0", "--label", "training", "--dry-run"),
    "rule-list": (),
    "rule-create": ("bad name", "--action", "ready"),
    "rule-set": ("none", "--disabled"),
    "rule-delete": ("none", "--yes"),
    "image-upload": ("/nowhere", "--name", "shell"),
    "image-list": (),
    "image-remove": (UNKNOWN_UUID, "--yes"),
    "nova-list": (),
    "nova-confirm": (UNKNOWN_UUID, "--yes"),
    "nova-withdraw": (UNKNOWN_UUID, "--yes"),
}
"""Arguments for each verb that `manage.py` and `cyborg` have in common. With them, a second run prints the same as the
first."""
SHARED_VERBS = [(noun, word, verb.name or "") for noun, verbs in VERBS.items() for word, verb in verbs.items()]


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("output_format", ["table", "json"])
def test_each_verb_prints_the_same_over_http_and_in_process(
    cyborg: Cyborg, fill: Fill, url: str, output_format: str
) -> None:
    fill(3)
    stand_ins = {
        "DEVICE": str(Device.objects.earliest("id").uuid),
        "COMMAND": str(Command.objects.earliest("id").uuid),
        "ROLLOUT": str(Rollout.objects.get().uuid),
        "ATTACHMENT": str(Attachment.objects.get().uuid),
    }
    assert {verb for _, _, verb in SHARED_VERBS} == {*SAME_OUTPUT}
    for noun, word, verb in SHARED_VERBS:
        words = [*(stand_ins.get(one, one) for one in SAME_OUTPUT[verb]), "-f", output_format]
        if verb in ("device-health", "device-show"):
            words += ["-c", "state"]
        remote = cyborg(verb, *words)
        try:
            status, out, err = run_verb(noun, word, *words, *(["--no-history"] if verb == "device-show" else []))
        except CommandError as error:
            status, out, err = 1, "", f"cyborg: {error}\n"
        assert status == (remote.exit_code if remote.exit_code in (0, 2) else 1), verb
        assert out == remote.stdout.replace(url, ""), verb
        spelled = remote.stderr
        for name, spelling in SPELLINGS.items():
            spelled = spelled.replace(f"cyborg {name}", spelling)
        assert err == spelled, verb


@pytest.mark.parametrize("noun", VERBS)
def test_help_lists_the_verbs_and_every_verb_has_an_example(noun: str) -> None:
    status, out, _ = run_verb(noun, "--help")
    assert status == 0 and out.startswith(f"Usage: manage.py {noun} [OPTIONS] COMMAND")
    assert f"\n  manage.py {noun} " in out and all(f"\n  {word} " in out for word in VERBS[noun])
    for word in VERBS[noun]:
        told = run_verb(noun, word, "--help")[1]
        assert f"Usage: manage.py {noun} {word} " in told
        assert f"Example:\n    manage.py {noun} {word}" in told and "cyborg" not in told.partition("Example:")[2]
        assert not re.search(r"device-(show|program)", told)


def test_no_option_is_one_that_django_takes_from_the_command_line() -> None:
    spellings = {
        spelling for verbs in VERBS.values() for verb in verbs.values() for p in verb.params for spelling in p.opts
    }
    assert spellings.isdisjoint({"--settings", "--pythonpath"}) and "--settings-file" in spellings


@pytest.mark.system
@pytest.mark.parametrize("word", ["install", "update"])
def test_django_leaves_the_settings_file_on_the_command_line_to_the_verb(word: str, tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "manage.py", "driver", word, "pci_driver", *words]
        return subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=settings.BASE_DIR)

    assert "--settings-file FILE" in (told := run("--help").stdout) and "--settings " not in told.replace(",", " ")
    file = tmp_path / "wrong.toml"
    file.write_text("[")
    done = run("--all", "--settings-file", str(file))
    assert done.returncode == 2 and "wrong.toml cannot be understood" in done.stderr


def test_every_command_that_can_be_ordered_has_a_verb() -> None:
    assert {*device_commands.ORDER_VERBS} == {
        f"{command.target}-{command.op}" for command in ORDERABLE_COMMANDS.values()
    }
    for command in ORDERABLE_COMMANDS.values():
        names = {parameter.name for parameter in device_commands.ORDER_VERBS[f"{command.target}-{command.op}"].params}
        assert not command.takes or command.takes in names


def test_device_list_filters_devices_and_prints_uuids_with_quiet(cards: list[str]) -> None:
    head, *lines = run_verb("device", "list", "--host", "cmp1", "--state", "inactive")[1].splitlines()
    assert head.split()[:3] == ["uuid", "state", "status"]
    assert [line.split()[:2] for line in lines] == [[uuid, "inactive"] for uuid in cards]
    rows = json.loads(run_verb("device", "list", "--json")[1])
    assert [row["address"] for row in rows] == [f"0000:0{n}:00.0" for n in (1, 2, 3)]
    assert run_verb("device", "list", "--quiet")[1].split() == cards
    assert run_verb("device", "list", "--state", "ready", "--quiet")[:2] == (0, "")


@pytest.mark.slow
def test_an_action_moves_every_named_device_and_a_refusal_exits_with_1(
    cards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(cards)))
    status, _, err = run_verb("device", "enable", "-", "--reason", "burnt in")
    assert (status, err) == (0, "")
    assert Device.objects.filter(state="ready", state_reason="burnt in").count() == 3
    events = Event.objects.filter(action="device.ready")
    assert {(event.source, event.actor) for event in events} == {("person", getpass.getuser())} and len(events) == 3
    first, second, third = cards
    assert run_verb("device", "disable", first)[0] == 0
    with pytest.raises(CommandError, match=f"There is no device {UNKNOWN_UUID}"):
        run_verb("device", "retire", first, second, UNKNOWN_UUID)
    status, out, _ = run_verb("device", "retire", first, second, "--json")
    assert status == 1
    assert {row["target"]: row["outcome"] for row in json.loads(out)} == {first: "done", second: "refused"}
    assert run_verb("device", "drain", third, "--then", "retired", "--yes")[0] == 0
    assert [*Device.objects.order_by("id").values_list("state", flat=True)] == ["retired", "ready", "retired"]
    assert run_verb("device", "reinstate", third)[0] == 0
    assert Device.objects.get(uuid=third).state == "inactive"
    with conductor.writing():
        Device.objects.update(state="ready", drain_to=None)
    bulks = Bulk.objects.count()
    assert run_verb("device", "drain", first, second, "--yes")[0] == 0
    assert Bulk.objects.count() == bulks + 1, "several devices are one bulk action"
    assert [*Device.objects.order_by("id").values_list("state", flat=True)] == ["maintenance", "maintenance", "ready"]


@pytest.mark.parametrize("wrong", ["nonsense", "cmp1/0000:77:00.0"])
def test_a_wrong_name_among_devices_changes_none(cards: list[str], wrong: str) -> None:
    try:
        status, _, err = run_verb("device", "enable", cards[0], wrong, cards[1])
    except CommandError as error:
        status, err = 1, str(error)
    assert status and f"{wrong!r}" in err
    assert Device.objects.filter(state="inactive").count() == 3


def test_each_request_has_an_id_that_its_events_and_a_failure_name(
    cards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_verb("device", "quarantine", *cards)
    ids = {*Event.objects.filter(action="device.quarantined").values_list("request_id", flat=True)}
    assert len(ids) == 1 and ids.pop().startswith("req-") and request_id.get() == ""

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(lifecycle, "apply_action_to_device", fail)
    with pytest.raises(CommandError, match=r"its log says why, under this answer's request id\. \(request req-"):
        run_verb("device", "release", cards[0])


@pytest.mark.parametrize("public_url", ["", "https://accelerators.example"])
def test_addresses_begin_with_the_public_url_and_else_are_paths(
    cards: list[str], monkeypatch: pytest.MonkeyPatch, public_url: str
) -> None:
    monkeypatch.setattr(authentication, "get_keys", lambda: Keys(public_url=public_url))
    monkeypatch.setattr(connection, "PAGE_SIZE", 2)
    rows = json.loads(run_verb("device", "list", "--json")[1])
    assert [row["url"] for row in rows] == [f"{public_url}/api/devices/{uuid}/" for uuid in cards]
    assert rows[0]["commands"] == f"{public_url}/api/commands/?device={cards[0]}"


def test_device_show_prints_facts_actions_commands_and_events(cards: list[str]) -> None:
    run_verb("device", "quarantine", cards[0], "--reason", "smoke")
    with pytest.raises(CommandError, match="cannot health it"):
        run_verb("command", "health", cards[0])
    out = run_verb("device", "show", cards[0])[1]
    for fact in ("state              quarantined", "release, retire", "smoke", "device.found", "device.quarantined"):
        assert " ".join(fact.split()) in " ".join(out.split())
    shown = json.loads(run_verb("device", "show", cards[0], "--json")[1])
    assert shown["latest_events"][0]["reason"] == "smoke" and shown["latest_commands"] == []


def test_admit_applies_the_admission_rules_and_dry_run_only_counts(cards: list[str]) -> None:
    admission_rules.create_rule({"name": "all", "action": "ready"}, Caller("olga", "", frozenset(), ""))
    (forecast,) = json.loads(run_verb("device", "admit", "--dry-run", "--json")[1])
    assert (forecast["number"], forecast["text"]) == (3, "becomes ready by rule all")
    assert Device.objects.filter(state="ready").count() == 0
    run_verb("device", "admit")
    assert Device.objects.filter(state="ready").count() == 3


def test_unknown_devices_and_wrong_usage_are_refused_with_a_message(
    cards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("nonsense"))
    with pytest.raises(CommandError, match="nothing here"):
        run_verb("device", "show", UNKNOWN_UUID)
    with pytest.raises(CommandError, match=r"There is no device 'cmp1/x': `manage\.py device list` lists"):
        run_verb("device", "show", "cmp1/x")
    for words in (("enable", "-"), ("enable",), ("list", "--colour"), ("dance",), ()):
        status, _, err = run_verb("device", *words)
        assert status == 2 and err, words


def test_no_policy_and_no_read_only_mode_stops_the_operator(cards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read_only.switch_read_only(True, Caller("olga", "", frozenset(), ""), "a restore", EventSource.SYSTEM)
    monkeypatch.setattr(policy, "is_allowed", lambda caller, rule: False)
    assert run_verb("device", "quarantine", cards[0])[0] == 0
    assert Device.objects.get(uuid=cards[0]).state_by == getpass.getuser()


def test_a_command_is_ordered_and_can_be_followed_later_with_show_wait(device: Device, agent: Agent) -> None:
    status, out, _ = run_verb("command", "health", str(device.uuid), "--reason", "looks ill")
    command = Command.objects.get()
    assert status == 0 and f"uuid      {command.uuid}\n" in out and "state     queued\n" in out
    event = Event.objects.get(action="command.ordered")
    assert (event.source, event.actor, command.reason) == ("person", getpass.getuser(), "looks ill")
    assert "state     queued\n" in run_verb("command", "show", str(command.uuid))[1]
    agent("succeeded", "it is well", temperature="41 °C")
    status, out, err = run_verb("command", "show", str(command.uuid), "--wait")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert status == 0 and ["state", "succeeded"] in lines and ["temperature", "41 °C"] in lines
    name = "health 1044 0000:01:00.0"
    assert err.splitlines() == [f"{name}: queued", f"{name}: started half of it", f"{name}: ended"]


def test_waiting_shows_a_bar_on_a_terminal_and_ends_with_1_if_it_failed(device: Device, agent: Agent) -> None:
    agent("failed", "no memory for them")
    words = ("partition", str(device.uuid), "--layout", "vfs=4", "size=2", "--wait")
    status, out, err = run_verb("command", *words, terminal=True)
    assert status == 1 and "no memory for them" in out
    assert Command.objects.get().arguments["layout"] == {"vfs": "4", "size": "2"}
    assert "50%" in err and "half of it" in err and "100%" in err


def test_json_output_of_ordering_and_listing_commands(device: Device, agent: Agent) -> None:
    agent(log="line\nline")
    status, out, _ = run_verb("command", "logs", "cmp1", "--wait", "--json")
    shown = json.loads(out)
    assert (status, shown["op"], shown["state"], shown["detail"]) == (0, "logs", "succeeded", {"log": "line\nline"})
    lines = run_verb("command", "show", shown["uuid"])[1].splitlines()
    assert [line.split() for line in lines[-2:]] == [["log", "line"], ["line"]]
    host = str(device.host.uuid)
    assert json.loads(run_verb("command", "rescan", host, "--driver", "d", "--json")[1])["state"] == "queued"
    rows = json.loads(run_verb("command", "list", "--host", "cmp1", "--json")[1])
    assert [row["op"] for row in rows] == ["rescan", "logs"]
    assert [row["op"] for row in json.loads(run_verb("command", "list", "--open", "--json")[1])] == ["rescan"]
    head, line, *_ = run_verb("command", "list")[1].splitlines()
    assert head.split()[:3] == ["uuid", "state", "percent"] and line.split()[1:4] == ["queued", "0", "rescan"]


def test_a_program_command_stores_the_image_that_it_wants(device: Device) -> None:
    run_verb("command", "program", str(device.uuid), "--image", IMAGE)
    assert Command.objects.get().arguments["wanted"] == {"bitstream_id": IMAGE}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("health", UNKNOWN_UUID), "Device not found"),
        (("logs", "nowhere"), "There is no host 'nowhere': `manage.py agents`"),
        (("logs", UNKNOWN_UUID), "Host not found"),
        (("show", UNKNOWN_UUID), "nothing here"),
    ],
)
def test_refused_orders_print_the_reason(device: Device, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        run_verb("command", *words)


def test_interrupting_the_wait_says_that_the_command_continues(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    replace_sleep(monkeypatch, stop)
    with pytest.raises(CommandError, match=r"work goes on\. To look again: manage\.py command show .* --wait"):
        run_verb("command", "reset", str(device.uuid), "--wait")
    assert Command.objects.filter(COMMAND_IS_OPEN).count() == 1


@pytest.mark.parametrize(("outcome", "status", "state"), [("succeeded", 0, "ready"), ("failed", 1, "failed")])
def test_device_enable_with_wait_reports_the_final_states(
    device: Device, agent: Agent, outcome: str, status: int, state: str
) -> None:
    agent(outcome, "so it went")
    uuids = list_device_uuids()
    ended, out, _ = run_verb("device", "enable", *uuids, "--wait", "--json")
    rows: list[dict[str, Any]] = json.loads(out)
    assert ended == status
    assert [row["state"] for row in rows] == [state, "ready"]
    assert "install" in run_verb("device", "show", uuids[0])[1]


@pytest.fixture
def hosts(db: None) -> None:
    """Report two hosts on which a driver is absent, and another one runs."""
    for n in range(2):
        apply_report(
            get_or_create_host(f"cmp{n}"), DriverReport("pci_driver", state="absent"), make_driver_report(make_card(1))
        )


def test_install_with_wait_takes_settings_from_a_file_and_prints_each_host(
    hosts: None, tmp_path: Path, agent: Agent
) -> None:
    file = tmp_path / "pci.toml"
    file.write_text('rules = [{vendor = "10de"}]\n')
    agent("succeeded", "it runs")
    words = ("pci_driver", "--all", "--settings-file", str(file), "--max-parallel", "1", "--reason", "new GPUs")
    status, out, err = run_verb("driver", "install", *words, "--wait")
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["cmp0", "done"], ["cmp1", "done"]]
    assert "1 of 2 hosts" in err and err.splitlines()[-1] == "install pci_driver: 2 of 2 hosts"
    events = Event.objects.filter(action="driver.wanted", source="person", reason="new GPUs", actor=getpass.getuser())
    assert events.count() == 2
    rows = json.loads(run_verb("driver", "list", "--driver", "pci_driver", "--json")[1])
    assert [row["wanted"]["settings"] for row in rows] == [{"rules": [{"vendor": "10de"}]}] * 2
    assert [row["seen"]["state"] for row in rows] == ["ok", "ok"]


def test_install_with_wait_exits_with_1_if_a_host_failed(hosts: None, agent: Agent) -> None:
    agent("failed", "no such GPU")
    words = ("pci_driver", "--match", "cmp*", "--max-parallel", "1", "--wait")
    status, out, err = run_verb("driver", "install", *words, terminal=True)
    assert status == 1 and "not begun: another host failed" in out and "2 of 2" in err
    assert run_verb("driver", "rollout", str(Rollout.objects.get().uuid), "--wait")[0] == 1


def test_a_rollout_is_started_listed_shown_and_cancelled(hosts: None) -> None:
    words = ("test_driver", "--running", "test_driver", "--disable", "--max-parallel", "1")
    status, _, err = run_verb("driver", "update", *words)
    rollout = Rollout.objects.get()
    assert (status, err) == (0, f"To follow the rollout: manage.py driver rollout {rollout.uuid} --wait\n")
    driver_rollouts.advance_oldest_rollout()
    assert len(json.loads(run_verb("driver", "list", "--drifts", "--json")[1])) == 1
    assert str(rollout.uuid) in run_verb("driver", "rollout")[1]
    assert json.loads(run_verb("driver", "rollout", "--json")[1])[0]["state"] == "running"
    shown = json.loads(run_verb("driver", "cancel", str(rollout.uuid), "--json")[1])
    assert [one["state"] for one in shown["steps"]] == ["ordered", "skipped"]
    assert shown["state"] == "cancelled"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("install", "pci_driver", "--host", "nope"), "There is no host 'nope'"),
        (("update", "pci_driver", "--host", "cmp0", "--enable"), "install it there first"),
        (("rollout", UNKNOWN_UUID), "nothing here"),
    ],
)
def test_refused_driver_commands_print_the_reason(hosts: None, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        run_verb("driver", *words)


@pytest.mark.parametrize(("text", "says"), [("[1]", "has no settings"), ("{", "cannot be understood")])
def test_invalid_settings_files_are_wrong_usage(hosts: None, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "settings.json"
    file.write_text(text)
    status, _, err = run_verb("driver", "install", "pci_driver", "--all", "--settings-file", str(file))
    assert status == 2 and says in err


NOT_UTF_8 = "\udcff"


@pytest.mark.parametrize("setting", ["a = nan", "a = inf", "a = 2020-01-01", "a = 07:32:00", f"a = {2**64}"])
def test_settings_that_json_cannot_hold_are_refused_in_one_sentence(hosts: None, tmp_path: Path, setting: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(setting)
    assert_refused_in_one_sentence("driver", "install", "pci_driver", "--all", "--settings-file", str(file))
    assert not Rollout.objects.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("driver", "install", "pci_driver", "--all", "--set", "a=NaN"),
        ("driver", "install", "pci_driver", "--all", "--set", f"a={2**64}"),
        ("driver", "install", "pci_driver", "--all", "--set", f"a={NOT_UTF_8}"),
        ("driver", "install", "pci_driver", "--host", NOT_UTF_8),
        ("driver", "install", NOT_UTF_8, "--all", "--reason", "new"),
        ("driver", "install", "pci_driver", "--all", "--reason", NOT_UTF_8),
        ("device", "quarantine", "DEVICE", "--reason", NOT_UTF_8),
        ("device", "list", "--host", NOT_UTF_8),
        ("accelerator", "update", "DEVICE", "--layout", "vfs=4", "--generation", str(2**64)),
    ],
)
def test_input_that_cannot_be_sent_is_refused_in_one_sentence(hosts: None, words: tuple[str, ...]) -> None:
    uuid = list_device_uuids()[0]
    assert_refused_in_one_sentence(*(uuid if word == "DEVICE" else word for word in words))
    assert not Rollout.objects.exists() and not Device.objects.exclude(state="inactive").exists()


def assert_refused_in_one_sentence(*words: str) -> None:
    """Assert that `manage.py` with these arguments fails with a message of one line, and without a traceback."""
    try:
        status, _, err = run_verb(*words)
    except CommandError as error:
        status, err = 1, str(error)
    assert status and err.encode() and len(err.splitlines()[-1]) > 20, (status, err)


@uses_database
def test_accelerator_list_shows_each_unit_with_its_state_and_instance() -> None:
    report_cards(build_divisible_card(1, 2), build_divisible_card(2, 1, "b"))
    handle = AttachHandle.objects.order_by("attach_info").first()
    assert handle is not None
    held = create_bound_request(handle)
    rows = json.loads(run_verb("accelerator", "list", "--json")[1])
    assert sorted((row["state"], row["host"]["name"], row["backend"]) for row in rows) == [
        ("Bound", "cmp1", "a"),
        ("free", "cmp1", "a"),
        ("free", "cmp1", "b"),
    ]
    (row,) = json.loads(run_verb("accelerator", "list", "--attached", "--json")[1])
    assert (row["state"], row["instance"]["uuid"], row["project"]) == ("Bound", held.instance_uuid, "p1")
    words = ("--free", "--backend", "b", "--host", "cmp1", "--json")
    assert len(json.loads(run_verb("accelerator", "list", *words)[1])) == 1
    assert json.loads(run_verb("accelerator", "list", "--driver", "x", "--json")[1]) == []


@uses_database
def test_create_delete_and_update_order_partitions_and_report_refusals() -> None:
    report_cards(build_divisible_card(1, 2), build_divisible_card(2, 1, "b"))
    words = ("cmp1/a", "cmp1/z", "--count", "2", "--reason", "guests", "--json")
    status, out, _ = run_verb("accelerator", "create", *words)
    ordered, refused = json.loads(out)
    command = Command.objects.get()
    assert (status, command.arguments["layout"], command.reason) == (1, {"vfs": "4"}, "guests")
    assert ordered["command"] == str(command.uuid) and refused["text"].startswith("Host cmp1 has no device")
    assert refused["reason"] == "not_found"
    other = str(get_device(2).uuid)
    status, out, _ = run_verb("accelerator", "delete", other, "--json")
    assert (status, json.loads(out)[0]["outcome"]) == (0, "ordered")
    assert Event.objects.filter(action="command.ordered", source="person", actor=getpass.getuser()).count() == 2
    with pytest.raises(CommandError, match="is at generation 1 now, not 0"):
        run_verb("accelerator", "update", other, "--layout", "vfs=3", "--generation", "0")
    assert run_verb("accelerator", "create", other, "--count", "0")[0] == 2
    assert run_verb("accelerator", "delete", "cmp1")[0] == 2, "neither a uuid nor HOST/BACKEND"


@uses_database
@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_update_with_wait_prints_the_outcome_and_exits_with_its_status(outcome: str, agent: Agent) -> None:
    report_cards(build_divisible_card(1, 2))
    agent(outcome, "as its driver says")
    status, out, _ = run_verb("accelerator", "update", str(get_device(1).uuid), "--layout", "vfs=3", "bind=x", "--wait")
    assert status == (outcome != "succeeded") and outcome in out and "as its driver says" in out
    assert Command.objects.get().arguments["layout"] == {"vfs": "3", "bind": "x"}
