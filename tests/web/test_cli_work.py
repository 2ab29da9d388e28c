"""Work that `cyborg` orders and follows to its end: what it says on the way, what it ends with, what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from django.db import connection

from accelerators import conductor
from accelerators.commands import placing
from accelerators.commands.placing import Answer, Progress
from accelerators.models import Attachment, Command, Deployable, Device, DriverWish, Host
from accelerators.models.attachments import AttachmentState
from accelerators.workflows import attachments, command_results, driver_rollouts
from agents.models import Agent
from cyborgweb.cli import following
from drivers.inventory import Backend, DriverReport, Service
from tests.support.reports import a_host, answer, apply, card
from tests.web.conftest import Cyborg, refused

pytestmark = pytest.mark.django_db(transaction=True)
Agents = Callable[..., AbstractContextManager[None]]
ACTS = "install partition health"
WORDS = {"acts": ACTS, "changeable": "vfs mtu", "sized_by": "vfs", "backend": "nics"}


@pytest.fixture
def host(transactional_db: None) -> Host:
    """Two cards, one of which has to be installed, on a host whose agent takes commands."""
    made = a_host("cmp1")
    apply(made, answer(card(1, to_install="make 4 virtual functions", **WORDS), card(2, **WORDS)))
    Agent.objects.create(host=made, public_key="key", ops="install partition rescan configure")
    return made


@contextmanager
def agents(outcome: str = "succeeded", text: str = "done", **of: str) -> Iterator[None]:
    """All agents, at work beside the test: each command is begun, then answered so; `of` names an op's own outcome."""

    def work() -> None:
        while not over.wait(0.01):
            for command in Command.objects.filter(state="queued", answered_at__isnull=True):
                placing.progressed([Progress(command.host_id, command.pk, 50, "half of it")])
                told.append(command.op)
            for command in Command.objects.filter(state="started", answered_at__isnull=True):
                placing.answer([Answer(command.host_id, command.pk, of.get(command.op, outcome), text)])
            command_results.settle()
            driver_rollouts.run()
        connection.close()

    told: list[str] = []
    over = Event()
    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def test_on_a_terminal_a_bar_goes_on_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    seen = [following.Progress(50, "half of it", False), following.Progress(100, "ended", True)]
    following.follow("install", "cyborg command show", lambda: seen.pop(0))
    assert "50%" in terminal.getvalue() and "100%" in terminal.getvalue()


def device(address: str) -> str:
    """Its uuid."""
    return str(Device.objects.get(address=address).uuid)


def test_a_device_that_has_to_be_installed_is_followed_until_it_is_ready(cyborg: Cyborg, host: Host) -> None:
    one, other = device("0000:01:00.0"), device("0000:02:00.0")
    with agents():
        done = cyborg("device-ready", one, other, "--reason", "burnt in", "-f", "json")
    assert done.exit_code == 0, done.output
    assert [(row["target"], row["state"]) for row in json.loads(done.stdout)] == [(one, "ready"), (other, "ready")]
    assert done.stderr.startswith("install: ") and Command.objects.get().reason == "burnt in"


def test_what_cannot_be_installed_says_why(cyborg: Cyborg, host: Host) -> None:
    with agents("failed", "no memory for them"):
        done = cyborg("device-ready", "cmp1/0000:01:00.0")
    assert done.exit_code == 1 and "no memory for them" in done.stdout and " failed " in done.stdout
    with agents("failed", "no memory for them"):
        assert cyborg("device-ready", "cmp1/0000:01:00.0", "cmp1/0000:02:00.0").exit_code == 6


def test_units_are_made_and_taken_away_each_device_by_itself(cyborg: Cyborg, host: Host) -> None:
    with agents():
        done = cyborg("accelerator-create", "--host", "cmp1", "--backend", "nics", "--count", "3", "-f", "json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["device"], row["outcome"], row["target"]) for row in rows] == [
        (device("0000:01:00.0"), "done", "cmp1 nics"),
        (device("0000:02:00.0"), "done", "cmp1 nics"),
    ]
    assert "create: " in done.stderr and " of 2; " in done.stderr
    assert {command.arguments["layout"]["vfs"] for command in Command.objects.all()} == {"3"}
    only = cyborg("accelerator-create", "--device", "cmp1/0000:01:00.0", "--no-wait", "-f", "csv")
    assert (only.exit_code, only.stdout.splitlines()[1].split(",")[1:3]) == (0, ["ordered", "queued"])
    busy = ("accelerator-create", "--device", "cmp1/0000:01:00.0", "--device", "cmp1/0000:02:00.0", "--count", "2")
    mixed = cyborg(*busy, "--no-wait", "-f", "json")
    assert mixed.exit_code == 6 and "is busy with partition" in json.loads(mixed.stdout)[0]["text"]
    refused(cyborg("accelerator-delete", "--device", "cmp1/0000:01:00.0"), 2, "give --yes")
    refused(cyborg("accelerator-create", "--host", "cmp1"), 2, "--device, or --host and --backend")
    refused(cyborg("accelerator-create", "--device", "cmp1/0000:01:00.0", "--layout", "vfs"), 2, "WORD=VALUE")


def test_a_layout_is_changed_of_the_generation_that_was_seen(cyborg: Cyborg, host: Host) -> None:
    seen = json.loads(cyborg("device-show", "cmp1/0000:02:00.0", "-f", "json").stdout)["generation"]
    words = ("accelerator-update", "cmp1/0000:02:00.0", "--layout", "mtu=9000", "--layout", "vfs=2")
    with agents():
        assert cyborg(*words, "--generation", str(seen)).exit_code == 0
    assert Command.objects.get().arguments["layout"] == {"mtu": "9000", "vfs": "2"}
    refused(cyborg(*words, "--generation", str(seen)), 1, "somebody changed it", "generation")
    refused(cyborg(*words[:2], "--layout", "colour=red"), 1, "colour", "vfs, mtu")
    with agents("failed", "the firmware says no"):
        failed = cyborg(*words)
    assert failed.exit_code == 1 and "the firmware says no" in failed.stdout


def test_drivers_look_again_where_they_are_told_to(cyborg: Cyborg, host: Host) -> None:
    a_host("cmp2")
    with agents():
        done = cyborg("discover-services", "cmp1", "--driver", "nic_driver")
        some = cyborg("discover-services", "--all-hosts", "-f", "json")
    assert done.exit_code == 0 and "succeeded" in done.stdout
    assert Command.objects.earliest("id").arguments == {"driver": "nic_driver"}
    assert [row["host"] for row in json.loads(some.stdout)] == ["cmp1", "cmp2"]
    refused(cyborg("discover-services", "cmp9"), 3, "There is no host 'cmp9'", "agent-list")


def test_who_stops_following_is_told_that_it_goes_on(
    cyborg: Cyborg, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(following.time, "sleep", interrupted)
    uuid = device("0000:02:00.0")
    left = cyborg("accelerator-create", "--device", uuid)
    refused(left, 130, "the ordered work goes on", f"cyborg device-show {uuid}")
    assert Command.objects.get().state == "queued"


def test_units_are_listed_held_and_free(cyborg: Cyborg, host: Host) -> None:
    assert cyborg("accelerator-list").stderr == "No accelerators.\n"
    rows: list[dict[str, Any]] = json.loads(cyborg("accelerator-list", "--free", "-f", "json").stdout)
    assert [(row["state"], row["host"]["name"], row["backend"]) for row in rows] == [("free", "cmp1", "nics")] * 2
    table = cyborg("accelerator-list", "--all", "--device", "cmp1/0000:02:00.0").stdout.splitlines()
    assert len(table) == 2 and table[1].split()[:5] == ["free", "0000:02:00.0", "PCI", "cmp1", "test_driver"]


def test_a_driver_is_brought_to_hosts_and_taken_from_them(cyborg: Cyborg, host: Host, tmp_path: Path) -> None:
    settings = tmp_path / "nic.toml"
    settings.write_text('[backends.nics]\nkind = "pci"\n')
    words = ("install-driver", "nic_driver", "--hosts-like", "cmp*", "--settings", str(settings), "--set", "mtu=9000")
    with agents():
        done = cyborg(*words, "--reason", "new cards", "-f", "json")
    assert done.exit_code == 0, done.output
    assert [(row["host"], row["state"]) for row in json.loads(done.stdout)] == [("cmp1", "done")]
    wish = DriverWish.objects.get()
    assert (wish.settings, wish.reason) == ({"backends": {"nics": {"kind": "pci"}}, "mtu": 9000}, "new cards")
    rows = json.loads(cyborg("driver-list", "--driver", "nic_driver", "-f", "json").stdout)
    assert [(row["host"]["name"], row["wanted"]["enabled"]) for row in rows] == [("cmp1", True)]
    with agents("failed", "it does not load"):
        failed = cyborg("update-driver", "nic_driver", "--all-hosts", "--disable")
    assert failed.exit_code == 1 and "it does not load" in failed.stdout and "1 failed" in failed.stderr
    refused(cyborg("uninstall-driver", "nic_driver", "--all-hosts"), 2, "give --yes")
    with agents():
        assert cyborg("uninstall-driver", "nic_driver", "--hosts-with", "nic_driver", "--yes").exit_code == 0


MISTAKES = (
    (("install-driver", "nic_driver"), 2, "Select hosts"),
    (("install-driver", "nic_driver", "--host", "cmp1", "--all-hosts"), 2, "Select hosts"),
    (("install-driver", "nic_driver", "--host", "cmp9"), 3, "There is no host 'cmp9'"),
    (("update-driver", "nic_driver", "--host", "cmp1"), 2, "Select what to change"),
    (("install-driver", "nic_driver", "--host", "cmp1", "--settings", "/none.toml"), 2, "cannot be read"),
    (("install-driver", "nic_driver", "--host", "cmp1", "--settings", __file__), 2, "cannot be understood"),
    (("install-driver", "nic_driver", "--host", "cmp1", "--set", "password=x"), 1, "password"),
)


def test_a_driver_is_not_brought_anywhere_by_mistake(cyborg: Cyborg, host: Host) -> None:
    for words, code, says in MISTAKES:
        refused(cyborg(*words), code, says)
    assert not Command.objects.exists()


def test_backends_and_services_are_listed_and_shown(cyborg: Cyborg, host: Host) -> None:
    services = (Service("sriov", "1", limits={"total_vfs": "8"}), Service("reset", "1", "unavailable", "no way"))
    found = Backend("nics", "pci", {"rack": "r1"}, services=services)
    apply(host, DriverReport("nic_driver", "", (), backends=(found, Backend("gpus", "mdev", error="it hung"))), seq=2)
    table = cyborg("backend-list").stdout.splitlines()
    assert table[1].split()[:3] == ["cmp1", "nic_driver", "gpus"] and "it hung" in table[1]
    assert "sriov, reset" in table[2] and "rack=r1" in table[2]
    shown = cyborg("backend-show", "nics").stdout
    assert "services  sriov  1  ready  total_vfs=8\n          reset  1  unavailable  no way\n" in shown
    key = json.loads(cyborg("backend-show", "nics", "--host", "cmp1", "-f", "json").stdout)["id"]
    assert cyborg("backend-show", key).stdout == shown
    ready = cyborg("service-list", "--state", "ready", "-f", "csv").stdout
    assert ready.splitlines()[1] == "cmp1,nic_driver,nics,sriov,1,ready,total_vfs=8,"
    refused(cyborg("backend-show", "disks"), 3, "There is no backend 'disks'", "backend-list")
    apply(a_host("cmp2"), DriverReport("nic_driver", "", (), backends=(found,)))
    refused(cyborg("backend-show", "nics"), 3, "give --host")


INSTANCE = "6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b"


@contextmanager
def attaching(**states: str) -> Iterator[None]:
    """The work of attaching, beside the test: from each state to that one, or to `fault`."""

    def work() -> None:
        while not over.wait(0.01):
            for row in Attachment.objects.filter(state__in=states):
                fault = "Placement has no room" if states[row.state] == "undoing" else row.fault
                with conductor.writing():
                    attachments.advance(row, AttachmentState(states[row.state]), "bound", "", fault=fault)
        connection.close()

    over = Event()
    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def test_an_instance_is_given_accelerators_and_they_are_taken_back(
    cyborg: Cyborg, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = attachments.Instance(INSTANCE, "p1", "ACTIVE", frozenset({"cmp1"}))
    monkeypatch.setattr(attachments, "_looks", [lambda instance, project: known])
    with conductor.writing():
        Device.objects.update(state="ready")
        Deployable.objects.filter(device__address="0000:02:00.0").update(rp_uuid=INSTANCE)
    attach = ("attach-instance", INSTANCE, "--device", "cmp1/0000:02:00.0")
    with attaching(asked="attaching", attaching="attached"):
        done = cyborg(*attach, "--reason", "a test")
    assert done.exit_code == 0, done.output
    assert "state" in done.stdout and "attached" in done.stdout and "attach: " in done.stderr
    with attaching(asked="attaching", attaching="undoing", undoing="failed"):
        refused(cyborg(*attach), 1, "Placement has no room")
    with attaching(asked="detached"):
        refused(cyborg(*attach), 1, "The attachment is detached.")
    refused(cyborg("detach-instance", INSTANCE), 2, "give --yes")
    with attaching(detaching="detached"):
        back = cyborg("detach-instance", INSTANCE, "--yes", "-f", "csv", "-c", "outcome,state")
    assert (back.exit_code, back.stdout) == (0, "outcome,state\ndone,detached\n")
    refused(cyborg("detach-instance", INSTANCE, "--yes"), 3, "has nothing that attach-instance attached")
    refused(cyborg("attach-instance", INSTANCE), 2, "--profile or --device")
    refused(cyborg("attach-instance", INSTANCE, "--profile", "none"), 3, "none")
