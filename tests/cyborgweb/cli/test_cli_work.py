"""Test verbs of `cyborg` that order work and follow it to its end: their progress, exit code and results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer, CommandProgress
from accelerators.images import store
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Attachment,
    Bulk,
    Command,
    Deployable,
    Device,
    DriverWish,
    Host,
    Image,
    Rollout,
)
from accelerators.models import Event as AuditEvent
from accelerators.models.attachments import AttachmentState
from accelerators.workflows import attachment_orders, command_endings, driver_rollouts
from agents.models import Agent
from cyborgweb.cli import accelerators, conflicts, following
from cyborgweb.settings.keys import Keys
from drivers.inventory import Backend, DriverReport, Service
from tests.accelerators.api.own.test_units import UNKNOWN_UUID, create_bound_request
from tests.cyborgweb.cli.conftest import Cyborg, assert_refused
from tests.support.background import running_beside
from tests.support.clocks import replace_sleep
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("agents_need_not_be_up")]
AgentsAtWork = Callable[..., AbstractContextManager[None]]
ACTS = "install partition health"
CARD_VALUES = {"acts": ACTS, "changeable": "vfs mtu", "sized_by": "vfs", "backend": "nics"}


@pytest.fixture
def host(transactional_db: None) -> Host:
    """Return a host whose agent takes commands, with two cards. One of them has to be installed."""
    made = get_or_create_host("cmp1")
    apply_report(
        made,
        make_driver_report(
            make_card(1, to_install="make 4 virtual functions", **CARD_VALUES), make_card(2, **CARD_VALUES)
        ),
    )
    Agent.objects.create(host=made, public_key="key", ops="install partition rescan configure")
    return made


@contextmanager
def run_agents(outcome: str = "succeeded", text: str = "done", **outcome_by_op: str) -> Iterator[None]:
    """Play all agents in a thread: start each command, then answer it with `outcome` and `text`. `outcome_by_op` has
    the outcome of single operations.
    """

    def work(over: Event) -> None:
        while not over.wait(0.01):
            for command in Command.objects.filter(state="queued", answered_at__isnull=True):
                command_queue.store_progress([CommandProgress(command.host_id, command.pk, 50, "half of it")])
                begun_ops.append(command.op)
            for command in Command.objects.filter(state="started", answered_at__isnull=True):
                command_queue.store_answers(
                    [CommandAnswer(command.host_id, command.pk, outcome_by_op.get(command.op, outcome), text)]
                )
            command_endings.end_answered_commands()
            driver_rollouts.run()
        connection.close()

    begun_ops: list[str] = []
    with running_beside(work):
        yield


def test_a_progress_bar_on_a_terminal_reaches_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    seen = [following.WorkProgress(50, "half of it", False), following.WorkProgress(100, "ended", True)]
    following.follow_until_ended("install", "cyborg command show", lambda: seen.pop(0))
    assert "50%" in terminal.getvalue() and "100%" in terminal.getvalue()


def test_the_progress_of_several_commands_is_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "commands/a/": {"ended_at": "2026-01-01", "percent": 10, "state": "failed", "progress": ""},
        "commands/b/": {"ended_at": None, "percent": 50, "state": "started", "progress": "half of it"},
    }
    seen: list[following.WorkProgress] = []
    monkeypatch.setattr(following, "follow_until_ended", lambda title, later_command, poll: seen.append(poll()))
    following.wait_for_commands(SimpleNamespace(get=answers.__getitem__), "install", "later", ["a", "b"])  # type: ignore[arg-type]
    assert seen == [following.WorkProgress(75, "1 of 2; started half of it", False)]


def get_device_uuid(address: str) -> str:
    """Return the uuid of the device with this PCI address."""
    return str(Device.objects.get(address=address).uuid)


@pytest.mark.slow
def test_device_ready_waits_until_the_installation_is_done(cyborg: Cyborg, host: Host) -> None:
    one, other = get_device_uuid("0000:01:00.0"), get_device_uuid("0000:02:00.0")
    with run_agents():
        done = cyborg("device-ready", one, other, "--reason", "burnt in", "-f", "json")
    assert done.exit_code == 0, done.output
    assert [(row["target"], row["state"]) for row in json.loads(done.stdout)] == [(one, "ready"), (other, "ready")]
    assert "enable: 2 of 2 devices" in done.stderr and Command.objects.get().reason == "burnt in"


@pytest.mark.slow
def test_device_ready_prints_why_an_installation_failed(cyborg: Cyborg, host: Host) -> None:
    with run_agents("failed", "no memory for them"):
        done = cyborg("device-ready", "cmp1/0000:01:00.0")
    assert done.exit_code == 1 and "no memory for them" in done.stdout and " failed " in done.stdout
    with run_agents("failed", "no memory for them"):
        assert cyborg("device-ready", "cmp1/0000:01:00.0", "cmp1/0000:02:00.0").exit_code == 6


@pytest.mark.slow
def test_accelerator_create_reports_each_device_and_its_refusal(cyborg: Cyborg, host: Host) -> None:
    with run_agents():
        done = cyborg("accelerator-create", "--host", "cmp1", "--backend", "nics", "--count", "3", "-f", "json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["device"], row["outcome"], row["target"]) for row in rows] == [
        (get_device_uuid("0000:01:00.0"), "done", "cmp1 nics"),
        (get_device_uuid("0000:02:00.0"), "done", "cmp1 nics"),
    ]
    assert "create: " in done.stderr and "2 of 2 devices" in done.stderr
    assert {command.arguments["layout"]["vfs"] for command in Command.objects.all()} == {"3"}
    only = cyborg("accelerator-create", "--device", "cmp1/0000:01:00.0", "--no-wait", "-f", "csv")
    assert (only.exit_code, only.stdout.splitlines()[1].split(",")[1:3]) == (0, ["ordered", "queued"])
    busy = ("accelerator-create", "--device", "cmp1/0000:01:00.0", "--device", "cmp1/0000:02:00.0", "--count", "2")
    mixed = cyborg(*busy, "--no-wait", "-f", "json")
    assert mixed.exit_code == 6 and "is busy with partition" in json.loads(mixed.stdout)[0]["text"]
    assert json.loads(mixed.stdout)[0]["reason"] == "conflict"
    assert cyborg("accelerator-create", "cmp1/disks").exit_code == 3
    assert_refused(cyborg("accelerator-delete", "--device", "cmp1/0000:01:00.0"), 2, "give --yes")
    assert_refused(cyborg("accelerator-create", "--host", "cmp1"), 2, "--device, or --host and --backend")
    assert_refused(cyborg("accelerator-create", "--device", "cmp1/0000:01:00.0", "--layout", "vfs"), 2, "KEY=VALUE")


@pytest.mark.slow
def test_units_of_several_hosts_are_changed_after_a_preview_and_failed_ones_are_retried(
    cyborg: Cyborg, host: Host
) -> None:
    twin = get_or_create_host("cmp2")
    apply_report(twin, make_driver_report(make_card(1, **CARD_VALUES)))
    Agent.objects.create(host=twin, public_key="other key", ops="partition")
    words = ("accelerator-create", "cmp1/nics", "cmp2/nics", "--count", "2")
    shown = cyborg(*words, "--dry-run", "-f", "csv", "-c", "number,outcome,text")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[1:] == ["3,will be done,is divided again with vfs=2; it has 0 units now"]
    assert_refused(cyborg(*words, "--no-wait"), 2, "give --yes")
    assert not Command.objects.exists() and not Bulk.objects.exists()
    done = cyborg(*words, "--yes", "--no-wait", "-f", "json")
    assert done.exit_code == 0, done.output
    assert [row["target"] for row in json.loads(done.stdout)] == ["cmp1 nics", "cmp1 nics", "cmp2 nics"]
    assert {command.arguments["layout"]["vfs"] for command in Command.objects.all()} == {"2"}
    assert_refused(cyborg(*words, "--filter", "host=cmp1"), 2, "Select devices in one way")
    first, bulk = Command.objects.earliest("id"), Bulk.objects.get(state="done")
    command_queue.store_answers([CommandAnswer(first.host_id, first.pk, "failed", "no room")])
    while command_endings.end_answered_commands():
        pass
    again = cyborg("accelerator-create", "--retry-failed", str(bulk.uuid), "--no-wait", "-f", "json")
    assert again.exit_code == 0, again.output
    assert [row["device"] for row in json.loads(again.stdout)] == [str(first.device and first.device.uuid)]
    assert Command.objects.filter(device=first.device).count() == 2


@pytest.mark.slow
def test_units_of_selected_devices_are_one_bulk_action_that_is_followed_without_a_request_for_each_device(
    cyborg: Cyborg, host: Host, sent: list[str]
) -> None:
    apply_report(host, make_driver_report(*(make_card(n, **CARD_VALUES) for n in range(1, 31))), seq=5)
    words = ("accelerator-create", "--filter", "host=cmp1", "--filter", "state=inactive", "--count", "2", "-f", "json")
    shown = json.loads(cyborg(*words, "--dry-run").stdout)
    assert [(row["number"], row["outcome"]) for row in shown] == [(30, "will be done")] and not Command.objects.exists()
    sent.clear()
    with run_agents("failed", "no room"):
        done = cyborg(*words)
    assert done.exit_code == 1, done.output
    assert {(row["outcome"], row["state"], row["text"]) for row in json.loads(done.stdout)} == {
        ("failed", "failed", "no room")
    }
    assert len(json.loads(done.stdout)) == Command.objects.count() == 30
    assert "30 of 30 devices, 30 refused or failed" in done.stderr
    bulk = Bulk.objects.get(state="done")
    polled = [one for one in sent if one == f"GET bulk_actions/{bulk.uuid}/"]
    others = [one for one in sent if one not in polled]
    assert others == ["POST accelerators/", "POST accelerators/", "GET bulk_results/"]
    assert_refused(cyborg("accelerator-delete", "--filter", "host=cmp9", "--yes"), 3, "matches no device")


@pytest.mark.slow
def test_interrupting_a_change_of_several_devices_names_its_bulk_action(
    cyborg: Cyborg, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        replace_sleep(patch, interrupt)
        left = cyborg("accelerator-create", "cmp1/nics")
    bulk = Bulk.objects.get(state="done")
    assert_refused(left, 130, "the ordered work goes on", f"cyborg bulk-show {bulk.uuid} --wait")
    assert Command.objects.count() == 2
    with run_agents():  # the commands end, so that the devices are not busy any more
        assert cyborg("command-show", str(Command.objects.earliest("id").uuid), "--wait").exit_code == 0
        assert cyborg("command-show", str(Command.objects.latest("id").uuid), "--wait").exit_code == 0
    monkeypatch.setattr(accelerators, "_follow_bulk_action", interrupt)
    left = cyborg("accelerator-create", "cmp1/nics")
    bulk = Bulk.objects.latest("id")
    assert_refused(left, 130, "1 change was accepted and goes on", f"cyborg bulk-show {bulk.uuid} --wait")


@pytest.mark.slow
def test_accelerator_update_shows_the_preview_of_the_service(cyborg: Cyborg, host: Host) -> None:
    words = ("accelerator-update", "cmp1/0000:02:00.0", "--layout", "vfs=2", "-f", "csv", "-c", "number,outcome,text")
    shown = cyborg(*words, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[1:] == ["1,will be done,is divided again with vfs=2; it has 0 units now"]
    create_bound_request(AttachHandle.objects.get(deployable__device__address="0000:02:00.0"))
    shown = cyborg(*words, "--dry-run")
    assert (shown.exit_code, "is held: it cannot be partitioned" in shown.stdout) == (0, True)
    assert not Command.objects.exists()


@pytest.mark.slow
def test_accelerator_update_with_an_outdated_generation_is_refused(cyborg: Cyborg, host: Host) -> None:
    seen = json.loads(cyborg("device-show", "cmp1/0000:02:00.0", "-f", "json").stdout)["generation"]
    words = ("accelerator-update", "cmp1/0000:02:00.0", "--layout", "mtu=9000", "--layout", "vfs=2")
    with run_agents():
        assert cyborg(*words, "--generation", str(seen)).exit_code == 0
    assert Command.objects.get().arguments["layout"] == {"mtu": "9000", "vfs": "2"}
    assert_refused(cyborg(*words, "--generation", str(seen)), 1, "somebody changed it", "generation")
    assert_refused(cyborg(*words[:2], "--layout", "colour=red"), 1, "colour", "vfs, mtu")
    with run_agents("failed", "the firmware says no"):
        failed = cyborg(*words)
    assert failed.exit_code == 1 and "the firmware says no" in failed.stdout


def test_accelerator_update_takes_all_devices_of_a_host_or_of_its_backends(cyborg: Cyborg, host: Host) -> None:
    apply_report(
        host,
        make_driver_report(*(make_card(n, **CARD_VALUES) for n in (1, 2)), driver="nic_driver"),
        make_driver_report(make_card(3, **CARD_VALUES | {"backend": "disks"}), make_card(4), driver="disk_driver"),
        seq=2,
    )
    apply_report(get_or_create_host("cmp2"), make_driver_report(make_card(1, **CARD_VALUES)))
    shown = ("--layout", "vfs=2", "--dry-run", "-f", "csv", "-c", "number,outcome")
    for words, number in {
        ("--host", "cmp1"): 3,
        ("--host", "cmp1", "--backend", "nics"): 2,
        ("--host", "cmp1", "--backend", "nics", "--backend", "disks"): 3,
        ("--host", "cmp1", "--host", "cmp2", "--backend", "nics"): 3,
        ("--host", "cmp1", "--backend", "disks"): 1,
    }.items():
        preview = cyborg("accelerator-update", *words, *shown)
        assert preview.stdout.splitlines()[1:] == [f"{number},will be done"], (words, preview.output)
    for words, text in {
        ("--backend", "nics"): "give both",
        ("--host", "cmp1", "--filter", "host=cmp1"): "name them, or give --host, or --filter",
        ("--host", "cmp1", "cmp1/0000:01:00.0"): "Select devices in one way",
        ("--host", "cmp1", "--backend", "disks", "--generation", "1"): "only for a single device",
    }.items():
        assert_refused(cyborg("accelerator-update", *words, "--layout", "vfs=2"), 2, text)
    for words in (("--host", "cmp9"), ("--host", "cmp1", "--backend", "gpus")):
        assert_refused(cyborg("accelerator-update", *words, "--layout", "vfs=2"), 3, "whose layout can be changed")
    done = cyborg("accelerator-update", "--host", "cmp1", "--backend", "nics", "--layout", "vfs=2", "--no-wait")
    assert done.exit_code == 0, done.output
    assert {command.device_id for command in Command.objects.all()} == {
        Device.objects.get(host=host, address=f"0000:0{n}:00.0").pk for n in (1, 2)
    }


@pytest.mark.slow
def test_the_layout_of_several_devices_is_changed_by_one_job_and_failed_ones_are_retried_by_the_same_verb(
    cyborg: Cyborg, host: Host
) -> None:
    words = ("accelerator-update", "cmp1/0000:01:00.0", "cmp1/0000:02:00.0", "--layout", "vfs=2")
    shown = cyborg(*words, "--dry-run", "-f", "csv", "-c", "number,outcome,text")
    assert shown.stdout.splitlines()[1:] == ["2,will be done,is divided again with vfs=2; it has 0 units now"]
    assert_refused(cyborg(*words, "--generation", "1"), 2, "--generation is only for a single device")
    assert_refused(cyborg(*words[:3]), 2, "Give --layout, unless you give --retry-failed")
    assert_refused(cyborg(*words, "--filter", "host=cmp1"), 2, "Select devices in one way")
    assert not Bulk.objects.exists() and not Command.objects.exists()
    with run_agents("failed", "no room"):
        failed = cyborg(*words, "--reason", "two each", "-f", "json")
    assert failed.exit_code == 1, failed.output
    assert [(row["target"], row["device"], row["outcome"], row["text"]) for row in json.loads(failed.stdout)] == [
        (f"cmp1/{address}", get_device_uuid(address), "failed", "no room")
        for address in ("0000:01:00.0", "0000:02:00.0")
    ]
    assert "update: 2 of 2 devices, 2 refused or failed" in failed.stderr
    assert {command.reason for command in Command.objects.all()} == {"two each"}
    again = ("--retry-failed", str(Bulk.objects.get().uuid))
    assert_refused(cyborg("accelerator-create", *again), 2, "is not a bulk action of `cyborg accelerator-create`")
    with run_agents():
        done = cyborg("accelerator-update", *again, "-f", "json")
    assert done.exit_code == 0, done.output
    assert [(row["outcome"], row["state"]) for row in json.loads(done.stdout)] == [("done", "succeeded")] * 2
    assert [command.arguments["layout"] for command in Command.objects.all()] == [{"vfs": "2"}] * 4
    apply_report(get_or_create_host("cmp2"), make_driver_report(make_card(1, **CARD_VALUES)))
    assert_refused(cyborg("accelerator-update", "--filter", "all=true", "--layout", "mtu=1"), 2, "give --yes")


@pytest.mark.slow
def test_bulk_show_waits_for_the_commands_and_installations_that_the_bulk_action_has_ordered(
    cyborg: Cyborg, host: Host
) -> None:
    update = ("accelerator-update", "--filter", "host=cmp1", "--layout", "vfs=2", "--no-wait")
    for outcome, code in (("failed", 1), ("succeeded", 0)):
        assert cyborg(*update).exit_code == 0
        bulk = Bulk.objects.latest("id")
        with run_agents(outcome):
            shown = cyborg("bulk-show", str(bulk.uuid), "--wait", "-f", "json")
        told = json.loads(shown.stdout)
        assert (shown.exit_code, told["commands"]["open"]) == (code, 0), shown.output
        failed = [(row["outcome"], row["state"], row["text"]) for row in told["failed"]]
        assert failed == [("failed", "failed", "done")] * 2 * code
    for outcome, code in (("failed", 6), ("succeeded", 0)):
        ordered = cyborg("device-ready", "--filter", "host=cmp1", "--no-wait", "-f", "json")
        assert [row["state"] for row in json.loads(ordered.stdout)] == ["installing", "ready"], ordered.output
        bulk = Bulk.objects.latest("id")
        with run_agents(outcome):
            shown = cyborg("bulk-show", str(bulk.uuid), "--wait")
        assert shown.exit_code == code, shown.output
        assert [line.split()[1:3] for line in shown.stdout.splitlines()].count(["failed", "failed"]) == bool(code)
        assert shown.stderr.endswith("enable: 2 of 2 devices\n")
        assert not Device.objects.filter(state="installing").exists()


@pytest.mark.slow
def test_discover_services_orders_a_rescan_on_the_named_hosts(cyborg: Cyborg, host: Host) -> None:
    get_or_create_host("cmp2")
    with run_agents():
        done = cyborg("discover-services", "cmp1", "--driver", "nic_driver")
        some = cyborg("discover-services", "--yes", "-f", "json")
        assert cyborg("discover-services", "--all-hosts", "--yes", "-f", "json").exit_code == 0
    assert done.exit_code == 0 and "succeeded" in done.stdout
    assert Command.objects.earliest("id").arguments == {"driver": "nic_driver"}
    assert [row["host"] for row in json.loads(some.stdout)] == ["cmp1", "cmp2"]
    ordered_count = Command.objects.count()
    assert_refused(cyborg("discover-services"), 2, "give --yes")
    assert_refused(cyborg("discover-services", "cmp1", "--all-hosts"), 2, "not both")
    assert Command.objects.count() == ordered_count
    assert_refused(cyborg("discover-services", "cmp9"), 3, "There is no host 'cmp9'", "agent-list")


def test_interrupting_the_wait_says_that_the_command_continues(
    cyborg: Cyborg, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    replace_sleep(monkeypatch, interrupted)
    uuid = get_device_uuid("0000:02:00.0")
    left = cyborg("accelerator-create", "--device", uuid)
    assert_refused(left, 130, "the ordered work goes on", f"cyborg device-show {uuid}")
    assert Command.objects.get().state == "queued"


def test_accelerators_are_labelled_by_filter_and_by_name(cyborg: Cyborg, host: Host) -> None:
    instances = ["aaaaaaaa-0000-4000-8000-000000000000", "bbbbbbbb-0000-4000-8000-000000000000"]
    requests = [
        create_bound_request(handle, instance=instance)
        for handle, instance in zip(AttachHandle.objects.order_by("id"), instances, strict=True)
    ]
    first, second = (str(one.uuid) for one in requests)
    words = ("accelerator-label", "--filter", "host=cmp1", "--label", "training")
    shown = cyborg(*words, "--dry-run", "-f", "csv", "-c", "number,outcome,text")
    assert shown.stdout == "number,outcome,text\n2,will be done,gets the label 'training'\n", shown.output
    done = cyborg(*words, "-f", "csv", "-c", "accelerator,outcome")
    assert done.stdout.splitlines()[1:] == [f"{first},done", f"{second},done"], done.output
    assert_refused(cyborg("accelerator-label", first, UNKNOWN_UUID, "--label", ""), 1, "There is no accelerator")
    done = cyborg("accelerator-label", first, "--label", "", "--reason", "ended", role="member")
    assert done.exit_code == 0, done.output
    assert '-  "label": "training",' in done.stderr and '+  "label": "",' in done.stderr
    same = cyborg("accelerator-label", first, "--label", "", "--generation", "7", "-f", "csv", "-c", "outcome,text")
    assert same.stdout == "outcome,text\nunchanged,has this label already\n", "whatever the generation"
    one = ("accelerator-label", first, "--label", "trial")
    refused = cyborg(*one, "--generation", "1")
    assert_refused(refused, 1, "is at generation 3 now, not 1")
    assert refused.stderr.count('+  "label": "trial",') == 1, "the difference is still the same when it is refused"
    assert [row["outcome"] for row in json.loads(cyborg(*one, "--generation", "3", "-f", "json").stdout)] == ["done"]
    assert cyborg("accelerator-label", first, "--label", "").exit_code == 0
    assert_refused(cyborg("accelerator-label", UNKNOWN_UUID, "--label", ""), 3)
    assert_refused(cyborg(*words, "--generation", "2"), 2, "only for a single accelerator")
    assert [*AcceleratorRequest.objects.order_by("id").values_list("label", flat=True)] == ["", "training"]
    assert AuditEvent.objects.filter(action="request.labelled", reason="ended").count() == 1
    with conductor.writing():
        AcceleratorRequest.objects.filter(pk=requests[0].pk).update(hostname="cmp2")
    assert_refused(cyborg("accelerator-label", first, second, "--label", "x"), 2, "give --yes")
    assert_refused(cyborg("accelerator-label", first), 2, "Give --label, unless")
    assert_refused(cyborg("accelerator-label", "--retry-failed", UNKNOWN_UUID, "--label", "x"), 2, "Give --label")


def test_accelerator_list_shows_held_and_free_units(cyborg: Cyborg, host: Host) -> None:
    assert cyborg("accelerator-list").stderr == "No accelerators are held. --all lists those that are free, too.\n"
    assert cyborg("accelerator-list", "--all", "--host", "nowhere").stderr == "No accelerators.\n"
    rows: list[dict[str, Any]] = json.loads(cyborg("accelerator-list", "--free", "-f", "json").stdout)
    assert [(row["state"], row["host"]["name"], row["backend"]) for row in rows] == [("free", "cmp1", "nics")] * 2
    table = cyborg("accelerator-list", "--all", "--device", "cmp1/0000:02:00.0").stdout.splitlines()
    assert len(table) == 2 and table[1].split()[:5] == ["free", "0000:02:00.0", "PCI", "cmp1", "test_driver"]


@pytest.mark.slow
def test_a_driver_is_installed_updated_and_uninstalled_on_hosts(cyborg: Cyborg, host: Host, tmp_path: Path) -> None:
    settings = tmp_path / "nic.toml"
    settings.write_text('[backends.nics]\nkind = "pci"\n')
    words = ("install-driver", "nic_driver", "--hosts-like", "cmp*", "--settings", str(settings), "--set", "mtu=9000")
    with run_agents():
        done = cyborg(*words, "--reason", "new cards", "-f", "json")
    assert done.exit_code == 0, done.output
    assert [(row["host"], row["state"]) for row in json.loads(done.stdout)] == [("cmp1", "done")]
    wish = DriverWish.objects.get()
    assert (wish.settings, wish.reason) == ({"backends": {"nics": {"kind": "pci"}}, "mtu": 9000}, "new cards")
    rows = json.loads(cyborg("driver-list", "--driver", "nic_driver", "-f", "json").stdout)
    assert [(row["host"]["name"], row["wanted"]["enabled"]) for row in rows] == [("cmp1", True)]
    with run_agents("failed", "it does not load"):
        failed = cyborg("update-driver", "nic_driver", "--all-hosts", "--disable")
    assert failed.exit_code == 1 and "it does not load" in failed.stdout and "1 failed" in failed.stderr
    assert_refused(cyborg("uninstall-driver", "nic_driver", "--all-hosts"), 2, "give --yes")
    with run_agents():
        assert cyborg("uninstall-driver", "nic_driver", "--hosts-with", "nic_driver", "--yes").exit_code == 0


@pytest.mark.slow
def test_a_change_of_a_driver_on_several_hosts_is_confirmed_by_typing_their_number(
    cyborg: Cyborg, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_report(get_or_create_host("cmp2"), make_driver_report(make_card(1)))
    disable = ("update-driver", "test_driver", "--hosts-with", "test_driver", "--disable", "--no-wait")
    shown = cyborg(*disable, "--dry-run", "-f", "json")
    assert json.loads(shown.stdout) == [
        {"outcome": "will be done", "number": 2, "held": False, "text": "it is changed"}
    ]
    assert_refused(cyborg(*disable), 2, "give --yes")
    assert not Rollout.objects.exists(), "neither leaves a draft"
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda stream: True)
    for wrong in ("", "y", "1"):
        declined = cyborg(*disable, typed=f"{wrong}\n")
        assert declined.exit_code != 0 and "2 will be done: it is changed" in declined.stderr
        assert "To confirm, type 2, the number of hosts" in declined.stderr
        assert_refused(declined, 1, "You did not confirm: nothing was changed.")
    assert not Command.objects.exists() and set(Rollout.objects.values_list("state", flat=True)) == {"draft"}
    done = cyborg(*disable, typed="2\n")
    assert done.exit_code == 0, done.output
    rollout = Rollout.objects.get(state="running")
    assert (rollout.total, rollout.enabled) == (2, False)
    with run_agents("failed", "it hangs"):
        assert cyborg("rollout-show", str(rollout.uuid), "--wait").exit_code == 1
    assert cyborg("rollout-show", str(Rollout.objects.filter(state="draft")[0].uuid), "--wait").exit_code == 1
    with conductor.writing():
        step = rollout.steps.earliest("id")
        rollout.steps.filter(pk=step.pk).update(state="done")
    assert cyborg("rollout-show", str(rollout.uuid), "--wait").exit_code == 6, "as the verb that began it"
    with conductor.writing():
        rollout.steps.filter(pk=step.pk).update(state=step.state)
    shown = cyborg("rollout-retry", str(rollout.uuid), "--dry-run", "-f", "json")
    assert sum(row["number"] for row in json.loads(shown.stdout)) == 2
    monkeypatch.undo()
    stored_count = Rollout.objects.count()
    assert_refused(cyborg("rollout-retry", str(rollout.uuid)), 2, "give --yes")
    assert_refused(cyborg("uninstall-driver", "test_driver", "--host", "cmp1"), 2, "give --yes")
    assert Rollout.objects.count() == stored_count
    with run_agents():
        again = cyborg("rollout-retry", str(rollout.uuid), "--yes", "-f", "json")
    assert [row["state"] for row in json.loads(again.stdout)] == ["done", "done"], again.output


@pytest.mark.slow
def test_set_and_unset_change_single_settings_and_a_conflict_shows_the_difference(
    cyborg: Cyborg, host: Host, tmp_path: Path
) -> None:
    file = tmp_path / "nic.json"
    file.write_text('{"mtu": 1500, "speed": 7}')
    on_host = ("nic_driver", "--host", "cmp1")
    with run_agents():
        assert cyborg("install-driver", *on_host, "--settings", str(file)).exit_code == 0
        done = cyborg("update-driver", *on_host, "--set", "mtu=9000", "--set", 'backends/nics={"kind": "pci"}')
        assert done.exit_code == 0, done.output
        assert '-    "mtu": 1500,' in done.stderr.splitlines() and '+    "mtu": 9000,' in done.stderr.splitlines()
        assert cyborg("update-driver", *on_host, "--unset", "speed").exit_code == 0
    settings = {"mtu": 9000, "backends": {"nics": {"kind": "pci"}}}
    assert DriverWish.objects.get().settings == settings
    refused = cyborg("update-driver", *on_host, "--set", "mtu=1", "--unset", "backends/nics", "--generation", "2")
    assert_refused(refused, 1, "is at generation 3 now, not 2", "[conflict]")
    lines = refused.stderr.splitlines()
    assert lines[:2] == ["--- present version", "+++ your version"]
    assert '-    "mtu": 9000' in lines and '+    "mtu": 1' in lines and any("nics" in line for line in lines)
    assert_refused(cyborg("update-driver", *on_host, "--settings", str(file), "--generation", "2"), 1, "generation 3")
    assert DriverWish.objects.get().settings == settings
    with run_agents():
        again = cyborg("update-driver", *on_host, "--replace-settings", str(file), "--generation", "3")
    assert again.exit_code == 0 and DriverWish.objects.get().settings == {"mtu": 1500, "speed": 7}
    assert_refused(cyborg("update-driver", *on_host, "--settings", str(file), "--unset", "a"), 2, "leave --unset out")


@pytest.mark.slow
def test_backends_are_added_changed_disabled_and_removed_one_at_a_time(
    cyborg: Cyborg, host: Host, tmp_path: Path
) -> None:
    file = tmp_path / "generic.toml"
    file.write_text('[backends.gpus]\nkind = "pci"\n')
    place = ("--host", "cmp1", "--driver", "nic_driver")
    assert_refused(cyborg("backend-add", "nics", *place, "--kind", "pci"), 1, "is not installed on cmp1")
    with run_agents():
        assert cyborg("install-driver", "nic_driver", "--host", "cmp1", "--settings", str(file)).exit_code == 0
        added = cyborg("backend-add", "nics", *place, "--kind", "mdev", "--set", "limits/max_devices=4")
        assert added.exit_code == 0 and added.stdout.splitlines()[1].split()[:2] == ["cmp1", "done"], added.output
        assert cyborg("backend-set", "nics", *place, "--set", "labels/rack=r1", "--unset", "limits").exit_code == 0
        assert cyborg("backend-disable", "gpus", *place, "--reason", "bad riser").exit_code == 0
    nics = {"kind": "mdev", "labels": {"rack": "r1"}}
    assert DriverWish.objects.get().settings == {"backends": {"gpus": {"kind": "pci", "enabled": False}, "nics": nics}}
    refused = cyborg("backend-remove", "gpus", *place, "--yes", "--generation", "1")
    assert_refused(refused, 1, "is at generation 4 now, not 1", "[conflict]")
    assert "--- present version" in refused.stderr
    assert_refused(cyborg("backend-remove", "gpus", *place), 2, "give --yes")
    assert_refused(cyborg("backend-set", "gpus", *place), 2, "Select what to change")
    with run_agents():
        assert cyborg("backend-enable", "gpus", *place).exit_code == 0
        assert cyborg("backend-remove", "nics", *place, "--yes", "--reason", "sold").exit_code == 0
    assert DriverWish.objects.get().settings == {"backends": {"gpus": {"kind": "pci", "enabled": True}}}
    assert_refused(cyborg("backend-enable", "nics", *place), 3, "is not in the settings that are set here")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("backend-add", "nics", "--kind", "pci"), "missing required field `match`"),
        (("backend-set", "gpus", "--set", "limits/max_devces=4"), "unknown field `max_devces` - at `$.limits`"),
        (("update-driver", "generic_driver", "--set", "mtu=9000"), "generic_driver has no setting 'mtu'"),
        (("install-driver", "generic_driver", "--set", "mtu=9000"), "generic_driver has no setting 'mtu'"),
    ],
    ids=lambda words: words[0],
)
def test_settings_that_the_driver_cannot_use_are_refused_and_not_stored(
    cyborg: Cyborg, host: Host, words: Sequence[str], says: str
) -> None:
    apply_report(host, DriverReport("generic_driver", ""), seq=2)
    settings = {"backends": {"gpus": {"kind": "pci", "match": [{"vendor": "10de"}]}}}
    with conductor.writing():
        DriverWish.objects.create(host=host, driver="generic_driver", settings=settings, generation=4)
    assert_refused(cyborg(*words, "--host", "cmp1"), 1, says, "Nothing was changed", "[invalid]")
    wish = DriverWish.objects.get()
    assert (wish.settings, wish.generation) == (settings, 4) and not Rollout.objects.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("update-driver", "nic_driver", "--host", "cmp1", "--set", "mtu=9000"),
        ("uninstall-driver", "nic_driver", "--host", "cmp1", "--yes"),
        ("backend-add", "nics", "--host", "cmp1", "--driver", "nic_driver", "--kind", "mdev"),
        ("backend-disable", "gpus", "--host", "cmp1", "--driver", "nic_driver"),
        ("backend-remove", "gpus", "--host", "cmp1", "--driver", "nic_driver", "--yes"),
    ],
    ids=lambda words: words[0],
)
def test_a_driver_that_somebody_changes_after_it_was_read_is_left_as_it_is(
    cyborg: Cyborg, host: Host, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    settings = {"mtu": 1500, "backends": {"gpus": {"kind": "pci"}}}
    with conductor.writing():
        wish = DriverWish.objects.create(host=host, driver="nic_driver", settings=settings, generation=4)

    changed = {"mtu": 1600, "backends": {"gpus": {"kind": "pci", "labels": {"rack": "r1"}}}}
    show_changes = conflicts.show_changes

    def change_meanwhile(present: object, wanted: object) -> list[str]:
        """Show the changes, then change the driver, as somebody else does before the request is sent."""
        with conductor.writing():
            DriverWish.objects.filter(pk=wish.pk).update(generation=5, settings=changed)
        return show_changes(present, wanted)

    monkeypatch.setattr(conflicts, "show_changes", change_meanwhile)
    refused = cyborg(*words)
    assert_refused(refused, 1, "nic_driver on cmp1 is at generation 5 now, not 4: somebody changed it", "[conflict]")
    shown_count = 1 if words[0] == "backend-add" else 2  # the new backend is compared with nothing, both times
    assert refused.stderr.count("--- present version") == shown_count, "before it was sent, and when it was refused"
    wish.refresh_from_db()
    assert wish.installed and wish.settings == changed


INVALID_DRIVER_COMMANDS = (
    (("install-driver", "nic_driver"), 2, "Select hosts"),
    (("install-driver", "nic_driver", "--host", "cmp1", "--all-hosts"), 2, "Select hosts"),
    (("install-driver", "nic_driver", "--host", "cmp9"), 3, "There is no host 'cmp9'"),
    (("update-driver", "nic_driver", "--host", "cmp1"), 2, "Select what to change"),
    (("install-driver", "nic_driver", "--host", "cmp1", "--settings", "/none.toml"), 2, "cannot be read"),
    (("install-driver", "nic_driver", "--host", "cmp1", "--settings", __file__), 2, "cannot be understood"),
    (("install-driver", "nic_driver", "--host", "cmp1", "--set", "password=x"), 1, "password"),
)


def test_invalid_driver_commands_are_refused_and_order_nothing(cyborg: Cyborg, host: Host) -> None:
    for words, code, says in INVALID_DRIVER_COMMANDS:
        assert_refused(cyborg(*words), code, says)
    assert not Command.objects.exists()


def test_backends_and_services_are_listed_and_shown(cyborg: Cyborg, host: Host) -> None:
    services = (Service("sriov", "1", limits={"total_vfs": "8"}), Service("reset", "1", "unavailable", "no way"))
    found = Backend("nics", "pci", {"rack": "r1"}, services=services)
    apply_report(
        host, DriverReport("nic_driver", "", (), backends=(found, Backend("gpus", "mdev", error="it hung"))), seq=2
    )
    table = cyborg("backend-list").stdout.splitlines()
    assert table[1].split()[:3] == ["cmp1", "nic_driver", "gpus"] and "it hung" in table[1]
    assert "sriov, reset" in table[2] and "rack=r1" in table[2]
    shown = cyborg("backend-show", "nics").stdout
    assert "services    sriov  1  ready  total_vfs=8\n            reset  1  unavailable  no way\n" in shown
    key = json.loads(cyborg("backend-show", "nics", "--host", "cmp1", "-f", "json").stdout)["id"]
    assert cyborg("backend-show", key).stdout == shown
    ready = cyborg("service-list", "--state", "ready", "-f", "csv").stdout
    assert ready.splitlines()[1] == "cmp1,nic_driver,nics,sriov,1,ready,total_vfs=8,"
    assert_refused(cyborg("backend-show", "disks"), 3, "There is no backend 'disks'", "backend-list")
    apply_report(get_or_create_host("cmp2"), DriverReport("nic_driver", "", (), backends=(found,)))
    assert_refused(cyborg("backend-show", "nics"), 3, "give --host")


INSTANCE = "6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b"


@contextmanager
def run_attachment_job(**states: str) -> Iterator[None]:
    """Run a thread that advances attachments: `states` maps each state to the next one."""

    def work(over: Event) -> None:
        while not over.wait(0.01):
            for row in Attachment.objects.filter(state__in=states):
                fault = "Placement has no room" if states[row.state] == "undoing" else row.fault
                with conductor.writing():
                    attachment_orders.advance_attachment(
                        row, AttachmentState(states[row.state]), "bound", "", fault=fault
                    )
        connection.close()

    with running_beside(work):
        yield


@pytest.fixture
def nova_instance() -> Iterator[None]:
    """Replace the look-up in Nova: every instance is INSTANCE, of the project p1, on the host."""
    known = attachment_orders.NovaInstance(INSTANCE, "p1", "ACTIVE", frozenset({"cmp1"}))
    with attachment_orders.INSTANCE_LOOKUP.replaced("nova", lambda instance, project: known):
        yield


@pytest.mark.slow
def test_attach_instance_and_detach_instance_wait_for_the_outcome(
    cyborg: Cyborg, host: Host, nova_instance: None
) -> None:
    with conductor.writing():
        Device.objects.update(state="ready")
        Deployable.objects.filter(device__address="0000:02:00.0").update(rp_uuid=INSTANCE)
    attach = ("attach-instance", INSTANCE, "--device", "cmp1/0000:02:00.0")
    with run_attachment_job(asked="attaching", attaching="attached"):
        done = cyborg(*attach, "--reason", "a test")
    assert done.exit_code == 0, done.output
    assert "state" in done.stdout and "attached" in done.stdout and "attach: " in done.stderr
    with run_attachment_job(asked="attaching", attaching="undoing", undoing="failed"):
        assert_refused(cyborg(*attach), 1, "Placement has no room")
    with run_attachment_job(asked="detached"):
        assert_refused(cyborg(*attach), 1, "The attachment is detached.")
    shown = cyborg("detach-instance", INSTANCE, "--dry-run", "-f", "csv", "-c", "number,outcome,held")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == "number,outcome,held\n1,will be done,no\n"
    assert_refused(cyborg("detach-instance", INSTANCE), 2, "give --yes")
    with run_attachment_job(detaching="detached"):
        back = cyborg("detach-instance", INSTANCE, "--yes", "-f", "csv", "-c", "outcome,state")
    assert (back.exit_code, back.stdout) == (0, "outcome,state\ndone,detached\n")
    assert_refused(cyborg("detach-instance", INSTANCE, "--yes"), 3, "has nothing that attach-instance attached")
    assert_refused(cyborg("attach-instance", INSTANCE), 2, "--profile or --device")
    assert_refused(cyborg("attach-instance", INSTANCE, "--profile", "none"), 3, "none")


def test_an_image_is_uploaded_listed_and_removed_over_http(cyborg: Cyborg, settings: Any, tmp_path: Path) -> None:
    settings.KEYS = Keys(state_dir=str(tmp_path), image_max_bytes=3_000_000)
    file = tmp_path / "shell.bin"
    file.write_bytes(content := bytes(range(256)) * 10_000)
    sent = cyborg("image-upload", str(file), "--property", "accel:function_id=AFU-1")
    assert sent.exit_code == 0, sent.output
    uuid = sent.stdout.strip()
    assert (store.get_image_directory() / uuid).read_bytes() == content
    (row,) = json.loads(cyborg("image-list", "--json").stdout)
    assert (row["uuid"], row["name"], row["properties"]) == (uuid, "shell.bin", {"accel:function_id": "AFU-1"})
    file.write_bytes(content * 2)
    assert_refused(cyborg("image-upload", str(file)), 1, "at most 3000000 bytes")
    assert_refused(cyborg("image-remove", uuid), 2, "give --yes")
    assert cyborg("image-remove", uuid, "--yes").stdout == f"removed  {uuid}\n"
    assert not Image.objects.exists()
