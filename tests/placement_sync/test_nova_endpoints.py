"""Test that an administrator can confirm an address of Nova, in the console, by `/api/` and by `manage.py nova`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from accelerators.domain.errors import RefusedError
from accelerators.models import Event
from cyborgweb.models import ApiToken
from cyborgweb.monitoring import backlog
from placement_sync.models import NovaEndpoint
from placement_sync.nova import endpoints
from placement_sync.nova.client import NovaUnavailableError

pytestmark = pytest.mark.django_db
LISTING = "admin:placement_sync_novaendpoint_changelist"


@pytest.fixture
def endpoint() -> NovaEndpoint:
    """Return an address of Nova that does not know two instances, and is not proven."""
    return NovaEndpoint.objects.create(url="http://nova", unknown_instances=2)


def press(client: Client, endpoint: NovaEndpoint, action: str = "confirm", **form: str) -> tuple[int, str]:
    """Run an action of the console's list for this address, by default `confirm`; return the status and the page."""
    answer = client.post(reverse(LISTING), {"action": action, "_selected_action": [str(endpoint.pk)], **form})
    return answer.status_code, answer.content.decode()


def press_confirm(client: Client, endpoint: NovaEndpoint) -> int:
    """Confirm this address on the console's second page and return the status."""
    return press(client, endpoint, sure="yes", reason="all are gone")[0]


def make_token(*roles: str) -> dict[str, str]:
    user, _ = User.objects.get_or_create(username="olga")
    return {"X-Auth-Token": ApiToken.create_with_secret("-".join(roles), user, list(roles), "p1")}


class CatalogueSession:
    """A session whose catalogue has this address of Nova, and takes this many seconds to be read."""

    def __init__(self, url: str | None, slow_s: float = 0.0) -> None:
        self.url, self.slow_s = url, slow_s

    def get_endpoint(self, service_type: str) -> str | None:
        time.sleep(self.slow_s)
        return self.url


def test_the_address_comes_from_the_catalogue_unless_it_is_configured() -> None:
    assert endpoints.resolve_url(CatalogueSession("http://nova/v2.1/"), "") == "http://nova/v2.1"
    assert endpoints.resolve_url(CatalogueSession("http://nova/v2.1/"), "http://other/") == "http://other"
    with pytest.raises(NovaUnavailableError, match="no service of the type compute"):
        endpoints.resolve_url(CatalogueSession(None), "")


def test_a_keystone_that_does_not_answer_ends_the_question_for_the_address_at_its_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(NovaUnavailableError, match="did not answer in time"):
        endpoints.resolve_url(CatalogueSession("http://nova", slow_s=3.0), "", deadline_s=0.2)
    assert time.monotonic() - started < 2.5


@pytest.mark.slow
def test_a_login_that_hangs_does_not_delay_the_end_of_the_process() -> None:
    code = """
import time
from placement_sync.nova import client
try:
    client.call_with_deadline(lambda: time.sleep(600), 0.1)
except client.NovaUnavailableError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "Nova did not answer in time\n"


def test_a_confirmed_address_is_trusted_and_its_event_names_who_and_why(endpoint: NovaEndpoint) -> None:
    assert backlog.read_backlog().unknown_to_nova == 2
    with pytest.raises(endpoints.UntrustedEndpointError):
        endpoints.refuse_unless_trusted(endpoint.url)
    endpoints.confirm_endpoint(endpoint.uuid, "olga", "all are gone")
    endpoints.refuse_unless_trusted(endpoint.url)
    event = Event.objects.get(action="nova.confirmed")
    assert (event.actor, event.reason, event.changes["endpoint"]) == ("olga", "all are gone", [None, "http://nova"])
    assert backlog.read_backlog().unknown_to_nova == 0
    endpoints.confirm_endpoint(endpoint.uuid, "vera")
    assert NovaEndpoint.objects.get().confirmed_by == "olga", "it is confirmed once"


def test_an_unusable_reason_confirms_nothing(endpoint: NovaEndpoint) -> None:
    with pytest.raises(RefusedError):
        endpoints.confirm_endpoint(endpoint.uuid, "olga", "x" * 10_000)
    assert not NovaEndpoint.objects.get().is_trusted


def test_an_administrator_confirms_an_address_by_the_api_and_nobody_else(
    client: Client, endpoint: NovaEndpoint
) -> None:
    url = f"/api/nova_endpoints/{endpoint.uuid}/confirm/"
    for roles in (("reader",), ("member",), ("manager", "member", "reader"), ("accelerator_operator",), ("auditor",)):
        answer = client.post(url, {}, content_type="application/json", headers=make_token(*roles))
        assert answer.status_code == 403, roles
    assert not NovaEndpoint.objects.get().is_trusted
    body = {"reason": "all are gone"}
    answer = client.post(url, body, content_type="application/json", headers=make_token("admin"))
    shown = json.loads(answer.content)
    assert (shown["address"], shown["trusted"], shown["confirmed_by"]) == ("http://nova", True, "admin")
    assert Event.objects.get(action="nova.confirmed").reason == "all are gone"


@pytest.mark.slow
def test_an_administrator_confirms_an_address_in_the_console_and_nobody_else(
    client: Client, endpoint: NovaEndpoint
) -> None:
    viewer = User.objects.create(username="vera", is_staff=True)
    client.force_login(viewer)
    assert press_confirm(client, endpoint) == 403
    for codename in ("view_novaendpoint", "change_device", "change_host"):
        viewer.user_permissions.add(Permission.objects.get(codename=codename))
    page = client.get(reverse(LISTING)).content.decode()
    assert "not trusted" in page
    assert "Why can’t I change anything here?" in page
    press_confirm(client, endpoint)
    assert not NovaEndpoint.objects.get().is_trusted
    client.force_login(User.objects.create_superuser("olga"))
    assert "not trusted" in client.get(reverse(LISTING)).content.decode()
    assert press_confirm(client, endpoint) == 302
    row = NovaEndpoint.objects.get()
    assert (row.confirmed_by, row.reason) == ("olga", "all are gone")
    assert "confirmed" in client.get(reverse(LISTING)).content.decode()


def test_the_command_line_lists_and_confirms_an_address(
    endpoint: NovaEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    call_command("nova", "list")
    assert "http://nova" in capsys.readouterr().out
    call_command("nova", "--", "confirm", str(endpoint.uuid), "--reason", "all are gone")
    row = NovaEndpoint.objects.get()
    assert (row.is_trusted, row.reason) == (True, "all are gone")
    output = capsys.readouterr()
    assert "From now on, requests of instances that it does not know are deleted" in output.err
    call_command("nova", "--", "confirm", str(endpoint.uuid))
    assert "Already trusted, nothing changed: http://nova" in capsys.readouterr().err
    call_command("nova", "--", "withdraw", str(endpoint.uuid), "--reason", "the wrong region")
    assert not NovaEndpoint.objects.get().is_trusted
    assert Event.objects.get(action="nova.withdrawn").reason == "the wrong region"


def test_the_command_line_says_where_addresses_are_listed_if_there_is_no_such_address() -> None:
    with pytest.raises(CommandError, match=r"There is no such address: .*nova list"):
        call_command("nova", "--", "confirm", str(uuid.uuid4()))


def test_the_console_asks_before_it_confirms_an_address_and_names_what_follows(
    client: Client, endpoint: NovaEndpoint
) -> None:
    client.force_login(User.objects.create_superuser("olga"))
    status, page = press(client, endpoint)
    assert status == 200
    assert not NovaEndpoint.objects.get().is_trusted
    for text in ("http://nova", "404 for 2 of", "are deleted", 'name="reason"', 'name="sure"'):
        assert text in page, text


def test_a_confirmation_that_changes_nothing_says_so_in_the_console(client: Client, endpoint: NovaEndpoint) -> None:
    NovaEndpoint.objects.update(proven_at="2026-01-01T00:00:00Z")
    client.force_login(User.objects.create_superuser("olga"))
    press_confirm(client, endpoint)
    page = client.get(reverse(LISTING)).content.decode()
    assert "Nothing changed: http://nova" in page
    assert "Confirmed: " not in page


def test_a_withdrawn_confirmation_is_not_believed_any_more_and_its_event_names_who_and_why(
    endpoint: NovaEndpoint,
) -> None:
    assert not endpoints.withdraw_confirmation(endpoint.uuid, "olga"), "it was not confirmed"
    endpoints.confirm_endpoint(endpoint.uuid, "olga", "all are gone")
    assert endpoints.withdraw_confirmation(endpoint.uuid, "vera", "the wrong region")
    with pytest.raises(endpoints.UntrustedEndpointError):
        endpoints.refuse_unless_trusted(endpoint.url)
    row = NovaEndpoint.objects.get()
    assert (row.confirmed_at, row.confirmed_by, row.reason) == (None, "", "")
    event = Event.objects.get(action="nova.withdrawn")
    assert (event.actor, event.reason, event.subject_name) == ("vera", "the wrong region", "http://nova")


def test_withdrawing_changes_nothing_at_an_address_that_is_proven(endpoint: NovaEndpoint) -> None:
    endpoints.confirm_endpoint(endpoint.uuid, "olga")
    NovaEndpoint.objects.update(proven_at="2026-01-01T00:00:00Z")
    assert not endpoints.withdraw_confirmation(endpoint.uuid, "vera")
    assert not Event.objects.filter(action="nova.withdrawn").exists()


def test_an_administrator_withdraws_a_confirmation_by_console_and_api_and_nobody_else(
    client: Client, endpoint: NovaEndpoint
) -> None:
    url = f"/api/nova_endpoints/{endpoint.uuid}/withdraw/"
    endpoints.confirm_endpoint(endpoint.uuid, "olga")
    for roles in (("member",), ("manager", "member", "reader"), ("accelerator_operator",)):
        answer = client.post(url, {}, content_type="application/json", headers=make_token(*roles))
        assert answer.status_code == 403, roles
    assert NovaEndpoint.objects.get().is_trusted
    answer = client.post(url, {}, content_type="application/json", headers=make_token("admin"))
    assert (answer.status_code, json.loads(answer.content)["trusted"]) == (200, False)
    endpoints.confirm_endpoint(endpoint.uuid, "olga")
    client.force_login(User.objects.create_superuser("otto"))
    assert press(client, endpoint, "withdraw")[0] == 200
    assert NovaEndpoint.objects.get().is_trusted
    assert press(client, endpoint, "withdraw", sure="yes")[0] == 302
    assert not NovaEndpoint.objects.get().is_trusted
