"""Tests of each page of the console, in light and dark: WCAG 2.1 AA checked by axe, a reason for each disabled control,
and no page that is wider than its window. The pages are found in the URL configuration; a new page that is not visited
fails here."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest
from django.template.loader import render_to_string
from django.urls import reverse
from playwright.sync_api import Page, expect

from cyborgweb.api.root import COLLECTIONS
from cyborgweb.manual import contents
from tests.browser.conftest import ConsoleDesk
from tests.browser.pages import (
    LISTS,
    find_colour_violations,
    find_unexplained_controls,
    find_violations,
    first_row,
    open_page,
)
from tests.browser.people import PASSWORD
from tests.support import addresses
from tests.system.product import ROOT, Product, environment

pytestmark = pytest.mark.browser
INSTALLATION = "cloud with work"

SINGLE_ROWS = {"cyborgweb_maintenance", "placement_sync_writer"}
"""Models whose only row has a page, whether it is stored or not."""
DEVICES = f"{LISTS}device/"
WINDOW = {"width": 1280, "height": 900}
"""The narrowest window in which no page may be wider than the window."""


@pytest.fixture(scope="module", autouse=True)
def _work(product: Product) -> None:
    known = environment(CYBORG_STATE_DIR=str(product.state))
    subprocess.run([sys.executable, "-m", "tests.browser.sample_work"], check=True, cwd=ROOT, env=known)


def check_page(page: Page, name: str, found: dict[str, list[str]]) -> None:
    """Store in `found` the violations of the open page, in light and in dark, its disabled controls without a reason,
    and whether it is too wide for WINDOW."""
    page.set_viewport_size(WINDOW)
    page.emulate_media(color_scheme="light")
    problems = find_violations(page) + find_unexplained_controls(page)
    page.emulate_media(color_scheme="dark")
    problems += [f"dark: {one}" for one in find_colour_violations(page)]
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        problems.append("the page is wider than the window")
    if problems:
        found[name] = problems


def check_addresses(page: Page, paths: Iterable[str]) -> list[str]:
    """Check each page, of refusals only the first of each status; return the paths that showed a page of their own."""
    found: dict[str, list[str]] = {}
    refusals: set[int] = set()
    shown = []
    for path in paths:
        answer = page.goto(path)
        assert answer is not None and answer.status in (200, 403), f"{path}: {answer and answer.status}"
        if answer.status == 403 and 403 in refusals:
            continue
        if answer.status == 200:
            shown.append(path)
        else:
            refusals.add(answer.status)
        check_page(page, path, found)
    assert found == {}
    return shown


def test_every_page_that_is_not_of_one_row_meets_wcag_level_aa(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    shown = check_addresses(page, addresses.list_fixed_pages())
    assert len(shown) > 45
    desk.drop_complaints("status of 403")
    page.goto("/admin/")
    links = page.get_by_role("navigation", name="Console").get_by_role("listitem").get_by_role("link")
    in_sidebar = links.evaluate_all("all => all.map(a => new URL(a.href).pathname)")
    forms = [f"{LISTS}admissionrule/add/", f"{LISTS}deviceprofile/add/", "/admin/cyborgweb/subscription/add/"]
    assert len(in_sidebar) > 20
    assert {*in_sidebar, *forms} <= {*shown}


def test_every_page_of_a_row_meets_wcag_level_aa(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    first: dict[str, str] = {}
    for model in addresses.list_models():
        page.goto(reverse(f"admin:{model}_changelist"))
        if model in SINGLE_ROWS:
            first[model] = reverse(f"admin:{model}_change", args=[1])
        elif row := first_row(page):
            first[model] = row
    assert addresses.list_models() and set(addresses.list_models()) == first.keys()
    paths = [
        first[model].replace("/change/", f"/{verb}/")
        for model, verb in addresses.list_row_pages()
        if (model, verb) != ("auth_user", "delete")
    ]
    paths.append(reverse("admin:accelerators_admissionrule_history", args=[1]))
    shown = check_addresses(page, paths)
    assert len(shown) > 20
    desk.drop_complaints("status of 403")


def send_decision(page: Page) -> None:
    """Open the confirmation of the drain of a device that is retired afterwards."""
    open_page(page, f"{DEVICES}?state=ready →")
    page.get_by_role("button", name="Drain, then retire…").click()


def rescan_host(page: Page) -> None:
    """Order a command to a host; its page is shown."""
    open_page(page, f"{LISTS}host/?q=cmp02 →")
    page.get_by_role("button", name="Rescan").click()


def choose_action(page: Page, path: str, label: str) -> None:
    """Choose an action for the first two rows of a list."""
    page.goto(path)
    for place in (0, 1):
        page.locator("#result_list tbody input[name=_selected_action]").nth(place).check()
    page.locator("select[name=action]").select_option(label=label)
    page.get_by_role("button", name="Run").click()


def apply_rules(page: Page) -> None:
    """Open the preview of the admission rules."""
    page.goto(f"{LISTS}admissionrule/")
    page.get_by_role("button", name="Apply them to devices").click()


OPENERS: dict[str, Callable[[Page], None]] = {
    "accelerators_device_decide": send_decision,
    "accelerators_host_order": rescan_host,
    "accelerators_acceleratorrequest_label": lambda page: choose_action(
        page, f"{LISTS}acceleratorrequest/?state=Bound", "Set the label"
    ),
    "accelerators_device_units": lambda page: choose_action(page, DEVICES, "Change the number of units"),
    "accelerators_admissionrule_apply": apply_rules,
}
"""How each page is shown that only a form leads to."""
NOT_SHOWN = {"accelerators_device_order"}
"""Such pages that the sample cannot show: the confirmation of a command to a device needs a connected agent."""


def test_every_preview_and_confirmation_meets_wcag_level_aa(desk: ConsoleDesk) -> None:
    assert OPENERS.keys() | NOT_SHOWN == addresses.POSTED_PAGES
    page = desk.open_as_administrator()
    found: dict[str, list[str]] = {}
    for name, show in OPENERS.items():
        show(page)
        expect(page.get_by_role("heading", level=1), name).to_be_visible()
        check_page(page, name, found)
    assert found == {}


def test_pages_of_errors_and_of_read_only_mode_meet_wcag_level_aa(desk: ConsoleDesk) -> None:
    page, viewer = desk.open_as_administrator(), desk.open_as("viewer", PASSWORD)
    found: dict[str, list[str]] = {}
    for person, path, status in (
        (page, "/admin/accelerators/device/999999/change/", 404),
        (page, "/help/no-such-page/", 404),
        (viewer, "/admin/auth/user/", 403),
    ):
        answer = person.goto(path)
        assert answer is not None and answer.status == status, path
        check_page(person, path, found)
    page.route("**/server-error/", lambda route: route.fulfill(status=500, body=render_to_string("500.html")))
    page.goto("/admin/server-error/")
    check_page(page, "the page of status 500", found)
    desk.product.manage("read_only", "on", "--reason", "the database moves")
    try:
        page.goto(f"{LISTS}deviceprofile/1/delete/")
        check_page(page, "the notice of read-only mode", found)
        page.get_by_role("button", name=re.compile("Delete")).or_(page.get_by_role("heading", level=1)).first.click()
        check_page(page, "a change in read-only mode", found)
    finally:
        desk.product.manage("read_only", "off")
    assert found == {}
    desk.drop_complaints("status of (40[34]|50[03])")


def test_the_conflict_page_meets_wcag_level_aa(desk: ConsoleDesk) -> None:
    first, second = desk.open_as_administrator(), desk.open_as_administrator()
    found: dict[str, list[str]] = {}
    for page in (first, second):
        open_page(page, f"{LISTS}admissionrule/ →")
    for page, vendor in ((first, "10de"), (second, "1af4")):
        page.locator("input[name=name]").fill("rack-2")
        page.locator("input[name=vendor]").fill(vendor)
        with page.expect_navigation():
            page.locator("button[name=_save], input[name=_save]").first.click()
    expect(second.get_by_role("heading", name="Both versions")).to_be_visible()
    check_page(second, "the conflict page", found)
    assert found == {}
    desk.drop_complaints("status of 409")


def test_every_page_of_the_manual_meets_wcag_level_aa(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    page.goto("/help/")
    links = page.get_by_role("link").evaluate_all("all => all.map(a => new URL(a.href).pathname)")
    paths = dict.fromkeys(path for path in links if path.startswith("/help/") and path.endswith("/"))
    assert len(paths) >= len(contents.load_entries())
    assert len(check_addresses(page, paths)) == len(paths)


def test_every_list_of_the_api_and_a_member_of_each_meets_wcag_level_aa(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    paths = ["/api/", "/api/docs/"]
    for name in COLLECTIONS:
        listed = f"/api/{name}/"
        paths.append(listed)
        rows = page.request.get(listed, params={"limit": 1}, headers={"Accept": "application/json"}).json()["results"]
        paths += [f"{listed}{rows[0]['uuid']}/" for _ in rows[:1] if "uuid" in rows[0]]
    assert len(paths) > 40
    check_addresses(page, paths)
