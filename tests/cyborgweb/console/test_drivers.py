"""Test drivers in the console: the list with its drift, the page that starts a rollout, and the page of a rollout."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from accelerators import conductor
from accelerators.models import Command, HostDriver, Rollout
from accelerators.workflows import driver_rollouts
from drivers.inventory import DriverReport
from tests.accelerators.workflows.test_rollouts import answer_as_agent, run_rollout
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.statements import count_statements

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]
LIST = "/admin/accelerators/hostdriver/"


@pytest.fixture(autouse=True)
def hosts() -> None:
    """Create three hosts on which pci_driver could be installed and test_driver runs."""
    for n in range(3):
        apply_report(
            get_or_create_host(f"cmp{n}"), DriverReport("pci_driver", state="absent"), make_driver_report(make_card(1))
        )


def driver_page(driver: str = "pci_driver", host: str = "cmp0") -> str:
    row = HostDriver.objects.get(driver=driver, host__name=host)
    return reverse("admin:accelerators_hostdriver_change", args=[row.pk])


def press_button(client: Client, address: str, **fields: str) -> str:
    """Press a button of a page, which sends the generation that the page shows, and return the next page."""
    shown = re.findall(r'name="generation" value="(\d+)"', client.get(address).content.decode())
    response = client.post(address, dict(generation=shown[0] if shown else "") | fields, follow=True)
    assert response.status_code == 200
    return response.content.decode()


@pytest.mark.slow
def test_a_driver_is_installed_from_its_page_and_its_rollout_is_shown_to_the_end(operator: Client) -> None:
    shown = operator.get(driver_page()).content.decode()
    assert "its host&#x27;s own file decides" in shown and 'value="install"' in shown
    assert 'value="uninstall"' not in shown
    shown = press_button(operator, driver_page(), do="install", settings='{"rules": []}', reason="new GPUs")
    assert "install pci_driver on 1 host" in shown and "1 ordered" in shown
    assert 'data-live="/admin/accelerators/rollout/' in shown
    listed = operator.get(f"{LIST}?drifts__exact=1").content.decode()
    assert "drifts" in listed and "generation 1" in listed and "cmp1" not in listed
    answer_as_agent(Command.objects.get())
    rollout = run_rollout(Rollout.objects.get())
    shown = operator.get(reverse("admin:accelerators_rollout_change", args=[rollout.pk])).content.decode()
    assert "1 done" in shown and "it runs" in shown and "data-live" not in shown
    shown = operator.get(driver_page()).content.decode()
    assert 'value="disable"' in shown and "&quot;rules&quot;: []" in shown and "drifts" not in shown
    shown = operator.get(reverse("admin:accelerators_rollout_now", args=[rollout.pk])).content.decode()
    assert "1 ordered" not in shown
    shown = operator.get(reverse("admin:accelerators_command_change", args=[Command.objects.get().pk])).content.decode()
    assert "<dt>Generation</dt>" in shown and "&quot;rules&quot;" in shown


def test_the_reason_why_a_driver_drifts_is_shown_on_its_page_and_in_the_list(operator: Client) -> None:
    press_button(operator, driver_page(), do="install")
    answer_as_agent(Command.objects.get(), "refused", "there is no such package")
    assert "there is no such package" in operator.get(LIST).content.decode()
    assert "there is no such package" in operator.get(driver_page()).content.decode()


@pytest.mark.slow
def test_a_rollout_to_all_hosts_can_be_cancelled_on_its_page(operator: Client) -> None:
    shown = press_button(
        operator, driver_page("test_driver"), do="disable", where="all", max_parallel="1", reason="recall"
    )
    rollout = run_rollout(Rollout.objects.get())
    assert "update test_driver on 3 hosts" in shown and "What this rollout would do now" in shown
    assert "will be done" in shown and "Update on 3 of 3" in shown and 'value="recall"' in shown
    page = reverse("admin:accelerators_rollout_change", args=[rollout.pk])
    for typed in ("", "2"):
        shown = press_button(operator, page, do="confirm", typed=typed, reason="recall")
        assert "This reaches 3 hosts. To confirm, type 3. Nothing was done." in shown
    assert not Command.objects.exists() and run_rollout(rollout).state == "draft"
    with conductor.writing():
        Rollout.objects.update(caller_id="another user of the same name")
    assert operator.post(page, {"do": "confirm", "typed": "3"}).status_code == 403
    assert "can confirm it" in operator.get(page).content.decode()
    with conductor.writing():
        Rollout.objects.update(caller_id=str(User.objects.get(username="olga").pk))
    press_button(operator, page, do="confirm", typed="3", reason="recall of the cards")
    rollout = run_rollout(Rollout.objects.get())
    assert (rollout.state, rollout.reason, Command.objects.count()) == ("running", "recall of the cards", 1)
    shown = press_button(operator, reverse("admin:accelerators_rollout_change", args=[rollout.pk]), do="cancel")
    assert "2 skipped" in shown and "not begun: cancelled by olga" in shown
    assert "cancelled" in operator.get("/admin/accelerators/rollout/").content.decode()
    answer_as_agent(Command.objects.get(), "failed", "no space")
    run_rollout(rollout)
    assert "Retry on the 3 hosts that failed or were not begun" in operator.get(page).content.decode()
    asked = press_button(operator, page, do="again")
    assert "Update on 3 of 3" in asked
    retried = Rollout.objects.latest("id")
    assert (retried.state, retried.enabled, retried.total, retried.max_parallel) == ("draft", False, 3, 1)


@pytest.mark.slow
def test_a_rollout_reaches_the_hosts_whose_names_match_the_pattern(operator: Client) -> None:
    get_or_create_host("gpu1")
    chosen = {"where": "named", "pattern": "cmp[01]", "do": "install"}
    assert "No host is chosen" in press_button(operator, driver_page(), **chosen | {"pattern": "gpu?x"})
    assert "Enter the names of the hosts" in press_button(operator, driver_page(), **chosen | {"pattern": " "})
    assert "Install on 2 of 2" in press_button(operator, driver_page(), **chosen)
    assert [step.host_name for step in Rollout.objects.get().steps.order_by("id")] == ["cmp0", "cmp1"]
    assert "Install on 4 of 4" in press_button(operator, driver_page(), **chosen | {"pattern": "*"})
    shown = press_button(operator, driver_page("test_driver"), where="named", pattern="*", do="disable")
    assert "Update on 3 of 3" in shown, "the driver does not run on gpu1"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"do": "install", "settings": "{"}, "The settings are not valid JSON"),
        ({"do": "install", "settings": "[]"}, "The settings must be a JSON object"),
        ({"do": "install", "settings": '{"password": "x"}'}, "looks like a secret"),
        ({"do": "enable"}, "install it there first"),
        ({"do": "settings"}, "Say what to change"),
    ],
)
def test_a_refused_rollout_shows_the_reason_on_the_page_of_the_driver(
    operator: Client, fields: dict[str, str], says: str
) -> None:
    shown = press_button(operator, driver_page(), **fields)
    assert says in shown
    assert not Rollout.objects.exists()


def test_viewers_see_drivers_but_cannot_change_them(client: Client) -> None:
    user = User.objects.create(username="vera", is_staff=True)
    user.user_permissions.add(*Permission.objects.filter(codename__in=["view_hostdriver", "view_rollout"]))
    client.force_login(user)
    assert 'name="do"' not in client.get(driver_page()).content.decode()
    assert client.post(driver_page(), {"do": "install"}).status_code == 403
    client.logout()
    assert client.get(LIST).status_code == 302


@pytest.mark.slow
def test_the_list_of_drivers_takes_the_same_statements_for_many_hosts(operator: Client) -> None:
    few = count_statements(operator, LIST)
    for n in range(3, 30):
        apply_report(
            get_or_create_host(f"cmp{n}"), DriverReport("pci_driver", state="absent"), make_driver_report(make_card(1))
        )
    assert count_statements(operator, LIST, enough=few) == few <= 12
    assert not driver_rollouts.advance_oldest_rollout()
