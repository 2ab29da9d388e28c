"""Test `--watch` of lists: in place on a terminal, otherwise by appending the rows that have changed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from accelerators import conductor
from accelerators.models import Device
from cyborgweb.cli import watching
from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.output import OutputOptions
from tests.cyborgweb.cli.conftest import Cyborg
from tests.cyborgweb.cli.terminal import Terminal
from tests.support.clocks import replace_sleep
from tests.support.reports import create_heard_host

pytestmark = pytest.mark.django_db(transaction=True)


def set_state(state: str, **selection: str) -> None:
    with conductor.writing():
        Device.objects.filter(**selection).update(state=state)


@pytest.fixture
def at_pauses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that takes what happens in each pause of the watch; after the last, the user presses Ctrl-C."""

    def plan(*happenings: Callable[[], None]) -> None:
        pending = [*happenings]

        def sleep(seconds: float) -> None:
            if not pending:
                raise KeyboardInterrupt
            pending.pop(0)()

        replace_sleep(monkeypatch, sleep)

    return plan


@pytest.mark.slow
def test_without_a_terminal_new_and_changed_rows_are_appended(cyborg: Cyborg, at_pauses: Callable[..., None]) -> None:
    create_heard_host("cmp1", 3)
    at_pauses(lambda: None, lambda: set_state("maintenance", address="0000:01:00.0"), lambda: None)
    shown = cyborg("device-list", "--watch", "-c", "address,state")
    assert shown.exit_code == 0, shown.output
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["address", "state"],
        *(["0000:00:00.0", "inactive"], ["0000:01:00.0", "inactive"], ["0000:02:00.0", "inactive"]),
        ["0000:01:00.0", "maintenance"],
    ]
    at_pauses(lambda: set_state("ready", address="0000:02:00.0"))
    lines = cyborg("device-list", "--watch", "0.5", "-c", "address,state", "-f", "json").stdout.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["inactive", "maintenance", "inactive", "ready"]
    at_pauses(lambda: set_state("failed", address="0000:02:00.0"))
    csv = cyborg("device-list", "--watch", "-c", "address,state", "-f", "csv").stdout.splitlines()
    assert csv[0] == "address,state" and csv[4:] == ["0000:02:00.0,failed"]


def test_the_header_is_printed_with_the_first_row_of_a_list_that_was_empty(
    cyborg: Cyborg, at_pauses: Callable[..., None]
) -> None:
    at_pauses(lambda: create_heard_host("cmp1", 1) and None)
    assert cyborg("device-list", "--watch", "-c", "address").stdout == "address\n0000:00:00.0\n"


@pytest.mark.slow
def test_on_a_terminal_the_table_is_refreshed_in_place_and_ctrl_c_ends_it_with_0(terminal: Terminal) -> None:
    create_heard_host("cmp1", 12)
    with terminal("device-list", "--watch", "0.5", "-c", "address,state", lines=10) as watching_program:
        watching_program.expect("\x1b[2J")
        watching_program.expect("\x1b[H" + "address       state")
        watching_program.expect("0000:00:00.0  inactive")
        watching_program.expect("… and 5 more lines")
        set_state("maintenance", address="0000:00:00.0")
        watching_program.expect("\x1b[H")
        watching_program.expect("0000:00:00.0  maintenance")
        assert watching_program.interrupt() == 0
    assert "Interrupted" not in watching_program.text


def test_a_server_that_is_away_is_asked_again_and_other_errors_end_the_watch(
    capsys: pytest.CaptureFixture[str], at_pauses: Callable[..., None]
) -> None:
    away = CliError(ExitCode.AWAY, "The server cannot be reached.")
    answers: list[Exception | list[dict[str, str]]] = [[{"name": "a"}], away, away, [{"name": "b"}]]

    def fetch() -> list[dict[str, str]]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    at_pauses(*[lambda: None] * 3)
    watching.watch_rows(fetch, ("name",), OutputOptions(watch_s=1), "")
    output = capsys.readouterr()
    assert output.out == "name\na\nb\n"
    assert output.err == "The server cannot be reached. It is asked again.\n\n"
    answers.append(CliError(ExitCode.NOT_ALLOWED, "no"))
    with pytest.raises(CliError):
        watching.watch_rows(fetch, ("name",), OutputOptions(watch_s=1), "")
