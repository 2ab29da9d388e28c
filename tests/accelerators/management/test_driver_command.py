"""`manage.py driver` as an operator uses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from django.core.management import CommandError

from accelerators.management.commands import driver as module
from accelerators.models import Command, Event, Rollout
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.workflows import driver_rollouts
from drivers.inventory import DriverReport
from tests.accelerators.management.test_command_command import run_command
from tests.accelerators.workflows import test_rollouts
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def hosts() -> None:
    """Two hosts on which a driver could be installed, and another runs."""
    for n in range(2):
        apply_report(
            get_or_create_host(f"cmp{n}"), DriverReport("pci_driver", state="absent"), make_driver_report(make_card(1))
        )


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`agents(outcome)`: whenever somebody waits, one of them answers so, and the job gets on."""

    def play(outcome: str) -> None:
        def step(seconds: float) -> None:
            if command := Command.objects.filter(COMMAND_IS_OPEN).first():
                test_rollouts.answer_as_agent(command, outcome, "no such GPU" if outcome == "failed" else "it runs")
            driver_rollouts.advance_oldest_rollout()

        monkeypatch.setattr(module.time, "sleep", step)

    return play


def test_install_with_wait_takes_settings_from_a_file_and_prints_each_hosts_progress(
    tmp_path: Path, agents: Callable[[str], None]
) -> None:
    file = tmp_path / "pci.toml"
    file.write_text('rules = [{vendor = "10de"}]\n')
    agents("succeeded")
    asked = (
        "install",
        "pci_driver",
        "--all",
        "--settings-file",
        str(file),
        "--max-parallel",
        "1",
        "--reason",
        "new GPUs",
    )
    status, out, err = run_command("driver", *asked, "--wait")
    assert status == 0
    assert out.splitlines()[-1] == "install pci_driver on 2 hosts: done"
    assert err.splitlines() == ["cmp0: ordered", "cmp0: done it runs", "cmp1: ordered", "cmp1: done it runs"]
    assert Event.objects.filter(action="driver.wanted", source="person", reason="new GPUs").count() == 2
    rows = json.loads(run_command("driver", "list", "--driver", "pci_driver", "--json")[1])
    assert [row["wanted"]["settings"] for row in rows] == [{"rules": [{"vendor": "10de"}]}] * 2
    assert [row["seen"]["state"] for row in rows] == ["ok", "ok"]


def test_install_with_wait_exits_with_1_if_a_host_failed(agents: Callable[[str], None]) -> None:
    agents("failed")
    status, out, err = run_command(
        "driver", "install", "pci_driver", "--match", "cmp*", "--max-parallel", "1", "--wait", terminal=True
    )
    assert status == 1
    assert out.splitlines()[-1] == "install pci_driver on 2 hosts: stopped"
    assert "not begun: another host failed" in out
    assert "2 of 2" in err


def test_a_rollout_is_started_listed_shown_and_cancelled() -> None:
    status, out, _ = run_command(
        "driver", "update", "test_driver", "--running", "test_driver", "--disable", "--max-parallel", "1"
    )
    rollout = Rollout.objects.get()
    assert (status, out.split(";")[0]) == (0, f"started on 2 hosts: {rollout.uuid}")
    driver_rollouts.advance_oldest_rollout()
    assert "drifts" in run_command("driver", "list", "--drifts")[1]
    assert str(rollout.uuid) in run_command("driver", "rollout")[1]
    assert json.loads(run_command("driver", "rollout", "--json")[1])[0]["state"] == "running"
    shown = json.loads(run_command("driver", "cancel", str(rollout.uuid), "--json")[1])
    assert [one["state"] for one in shown["hosts"]] == ["ordered", "skipped"]
    assert shown["state"] == "cancelled"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("install", "pci_driver"), "Give either the names of the hosts"),
        (("install", "pci_driver", "--host", "nope"), "There is no host nope"),
        (("install", "pci_driver", "--all", "--settings-file", "/nowhere.toml"), "cannot be read"),
        (("update", "pci_driver", "--host", "cmp0", "--enable"), "install it there first"),
        (("rollout", "11111111-2222-4333-8444-555555555555"), "there is no rollout"),
    ],
)
def test_refused_driver_commands_print_the_reason(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        run_command("driver", *words)


@pytest.mark.parametrize(
    ("text", "says"), [("[1]", "contains no object"), ("{", "is not JSON"), ('{"a_token": 1}', "secret")]
)
def test_invalid_settings_files_are_refused_with_the_reason(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "settings.json"
    file.write_text(text)
    with pytest.raises(CommandError, match=says):
        run_command("driver", "install", "pci_driver", "--all", "--settings-file", str(file))
