"""Test that a shell completes the names of hosts, drivers, profiles and devices, and never gets an error message."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelerators.models import Device
from drivers.inventory import DriverReport
from tests.cyborgweb.cli.conftest import Cyborg, run_cyborg
from tests.support.reports import apply_report, create_heard_host, get_or_create_host

ROOT = Path(__file__).resolve().parents[3]
uses_database = pytest.mark.django_db(transaction=True)


def complete(words: str, shell: str = "bash") -> dict[str, str]:
    """Return the environment with which a shell asks for the completions of `words`."""
    asked = {"_CYBORG_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
    return asked | {"COMP_CWORD": words.rpartition(" ")[2] if shell == "fish" else str(words.count(" "))}


@uses_database
@pytest.mark.parametrize(("shell", "form"), [("bash", "plain,{}\n"), ("zsh", "plain\n{}\n_\n"), ("fish", "plain,{}\n")])
def test_names_are_completed_in_each_shell(cyborg: Cyborg, shell: str, form: str) -> None:
    create_heard_host("cmp1", 1)
    create_heard_host("gpu7", 1)
    apply_report(get_or_create_host("cmp9"), DriverReport("pci_driver", state="absent"))
    uuid = str(Device.objects.first().uuid)  # type: ignore[union-attr]
    for words, offered in (
        ("cyborg device-list --host gp", "gpu7"),
        ("cyborg discover-services cmp1", "cmp1"),
        ("cyborg device-list --driver pci", "pci_driver"),
        (f"cyborg device-show {uuid[:6]}", uuid[:13]),
        (f"cyborg device-ready {uuid[:15]}", uuid),
    ):
        answer = cyborg(**complete(words, shell))
        assert answer.stderr == "" and form.format(offered) in answer.stdout, (words, answer.output)
        assert answer.stdout.count("plain") == 1, (words, answer.output)


@uses_database
def test_whoever_may_not_see_the_names_gets_none_and_no_message(cyborg: Cyborg) -> None:
    create_heard_host("cmp1", 1)
    answer = cyborg(role="member", **complete("cyborg device-list --host "))
    assert (answer.stdout.strip(), answer.stderr) == ("", "")


@pytest.mark.parametrize("environment", [{}, {"CYBORG_URL": "ftp://x", "CYBORG_TOKEN": "a b"}, {"OS_CLOUD": "none"}])
def test_without_a_usable_login_nothing_is_offered_and_nothing_printed(environment: dict[str, str]) -> None:
    answer = run_cyborg(**environment, **complete("cyborg device-list --host c"))
    assert (answer.stdout.strip(), answer.stderr) == ("", "")


@pytest.mark.slow
def test_a_server_that_does_not_answer_delays_the_shell_for_two_seconds_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {"CYBORG_URL": address, "CYBORG_TOKEN": "abc", **complete("cyborg agent-list --host c")}
        code = "from cyborgweb.cli.main import main; main()"
        began_at = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
    assert time.monotonic() - began_at < 20, "it did not wait for as long as a verb would"
