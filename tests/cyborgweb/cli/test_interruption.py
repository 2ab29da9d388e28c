"""Test what `cyborg` says and does when the user presses Ctrl-C, and how it asks for the number of hosts."""

from __future__ import annotations

import pytest

from accelerators.models import Command, Device
from cyborgweb.cli import connection
from cyborgweb.cli.connection import HttpApiClient
from tests.cyborgweb.cli.conftest import Cyborg, assert_refused
from tests.cyborgweb.cli.terminal import Terminal
from tests.support.reports import create_heard_host

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def interrupt_post(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Press Ctrl-C during the POST with the number in the returned list, counted from 1."""
    numbers = [1]
    send_request, sent = HttpApiClient.send_request, []

    def send(self: HttpApiClient, method: str, path: str, **request_options: object) -> dict[str, object]:
        if method == "POST":
            sent.append(path)
            if len(sent) == numbers[0]:
                raise KeyboardInterrupt
        return send_request(self, method, path, **request_options)

    monkeypatch.setattr(connection.HttpApiClient, "send_request", send)
    return numbers


def test_an_interruption_names_what_was_ordered_and_the_request_that_was_not_answered(
    cyborg: Cyborg, interrupt_post: list[int]
) -> None:
    for number in (1, 2, 3):
        create_heard_host(f"cmp{number}", 1)
    interrupt_post[0] = 3
    left = cyborg("discover-services", "cmp1", "cmp2", "cmp3")
    first, second = Command.objects.order_by("id")
    assert_refused(
        left,
        130,
        "2 changes were accepted and go on",
        f"cyborg command-show {first.uuid} --wait; cyborg command-show {second.uuid} --wait",
        "The request to /api/commands/ was not answered yet",
    )


def test_an_interruption_before_any_change_says_that_nothing_was_ordered(
    cyborg: Cyborg, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: HttpApiClient, *arguments: object, **request_options: object) -> dict[str, object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(connection.HttpApiClient, "send_request", interrupt)
    assert_refused(cyborg("device-list"), 130, "Interrupted. Nothing was ordered.")


def test_an_interruption_of_the_removal_of_a_backend_says_that_it_may_have_been_made(
    cyborg: Cyborg, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_heard_host("cmp1", 1)
    send_request = HttpApiClient.send_request

    def send(self: HttpApiClient, method: str, path: str, **request_options: object) -> dict[str, object]:
        if method == "DELETE":
            raise KeyboardInterrupt
        return send_request(self, method, path, **request_options)

    monkeypatch.setattr(connection.HttpApiClient, "send_request", send)
    left = cyborg("backend-remove", "gpus", "--host", "cmp1", "--yes")
    assert_refused(left, 130, "The request to /api/backends/", "was not answered yet")


@pytest.mark.slow
def test_more_than_three_accepted_changes_are_counted(cyborg: Cyborg, interrupt_post: list[int]) -> None:
    for number in range(6):
        create_heard_host(f"cmp{number}", 1)
    interrupt_post[0] = 6
    left = cyborg("discover-services", *(f"cmp{number}" for number in range(6)))
    assert_refused(left, 130, "5 changes were accepted", "and 2 more: cyborg command-list --open.")


@pytest.mark.slow
def test_discover_services_without_hosts_asks_for_the_number_of_hosts(terminal: Terminal) -> None:
    create_heard_host("cmp1", 1)
    create_heard_host("cmp2", 1)
    with terminal("discover-services", "--no-wait") as declining:
        declining.expect("The drivers of all 2 hosts will look for devices. To confirm, type the number 2: ")
        declining.type("y\n")
        assert declining.end() == 1 and "You did not confirm: nothing was changed." in declining.text
    with terminal("discover-services", "--no-wait") as interrupting:
        interrupting.expect("type the number 2: ")
        assert interrupting.interrupt() == 130 and "Interrupted. Nothing was ordered." in interrupting.text
    assert not Command.objects.exists()
    with terminal("discover-services", "--no-wait") as confirming:
        confirming.expect("type the number 2: ")
        confirming.type("2\n")
        assert confirming.end() == 0
    assert Command.objects.filter(op="rescan").count() == 2


@pytest.mark.slow
def test_declining_a_confirmation_changes_nothing(terminal: Terminal) -> None:
    create_heard_host("cmp1", 1)
    with terminal("device-retire", "cmp1/0000:00:00.0") as declining:
        declining.expect("[y/N]: ")
        declining.type("n\n")
        assert declining.end() == 1 and "nothing was changed" in declining.text
    assert Device.objects.get().state == "inactive"
