"""Tests of every page of the console and of the APIs as an administrator sees it: no violation of the content security
policy and no script error; for the main pages WCAG 2.1 AA checked by axe, and screenshots in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ConsoleDesk
from tests.browser.pages import MAIN, find_colour_violations, find_violations, first_row, open_page, picture

pytestmark = pytest.mark.browser
INSTALLATION = "cloud"
TOP_SCRIPT = "it => it.getBoundingClientRect().y"

AXE_PAGES = (
    "login",
    "overview",
    "usage",
    "census",
    "hosts",
    "host",
    "switches",
    "devices",
    "device",
    "rule",
    "request",
    "event",
    "placement",
    "agents",
    "user",
    "api-devices",
)
"""The pages that axe-core checks: one of each kind."""
DARK_AXE_PAGES = ("login", "overview", "usage", "census", "switches", "devices", "device", "rule", "request", "event")
UNLINKED_PAGES = (
    "/admin/auth/user/add/",
    "/admin/auth/group/add/",
    "/admin/password_change/",
    "/admin/accelerators/admissionrule/add/",
    "/api/docs/",
    "/v2",
    "/v2/devices",
)
"""Pages that the console's navigation does not link to."""

TOP_SCRIPT = "it => it.getBoundingClientRect().y"


def visit_every_page(page: Page) -> Iterator[str]:
    """Open every page in turn, with the first detail page of each list; yield the path while the page is open."""
    page.goto("/admin/")
    links = page.get_by_role("navigation", name="Console").get_by_role("link")
    for path in dict.fromkeys(urlsplit(link).path for link in links.evaluate_all("all => all.map(a => a.href)")):
        page.goto(path)
        yield path
        if detail := first_row(page):
            page.goto(detail)
            yield detail
    for path in UNLINKED_PAGES:
        page.goto(path)
        yield path


@pytest.mark.parametrize("name", MAIN)
def test_main_pages_meet_wcag_level_aa_in_light_and_dark(name: str, desk: ConsoleDesk, screens: Path) -> None:
    desk.renew_leases()
    page = desk.open_logged_out() if name == "login" else desk.open_as_administrator()
    open_page(page, MAIN[name])
    picture(page, screens / f"{name}-light.png")
    found = find_violations(page) if name in AXE_PAGES else []
    page.emulate_media(color_scheme="dark")
    picture(page, screens / f"{name}-dark.png")
    assert found + (find_colour_violations(page) if name in DARK_AXE_PAGES else []) == []


def test_no_page_violates_its_content_security_policy_or_has_a_script_error(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    seen = list(visit_every_page(page))
    page.wait_for_load_state("networkidle")
    assert len(seen) > 30


def test_headings_of_a_list_stay_in_view_and_compact_rows_are_remembered(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    page.set_viewport_size({"width": 1280, "height": 700})
    page.goto("/admin/accelerators/event/")
    heading, rows = page.locator("#result_list thead th").nth(1), page.locator("#result_list tr.data-row")
    assert rows.count() > 12, "the rows are higher than the window"

    def get_distance() -> float:
        """Return how far the heading is below the top of its list. What is above the list may change its height."""
        return float(
            heading.evaluate(TOP_SCRIPT) - page.locator("[data-simplebar]:has(#result_list)").evaluate(TOP_SCRIPT)
        )

    before = get_distance()
    rows.last.scroll_into_view_if_needed()
    assert get_distance() == before
    assert heading.is_visible()
    high = rows.first.locator("td").last.evaluate("cell => getComputedStyle(cell).paddingTop")
    page.get_by_role("button", name="Compact rows").click()
    page.reload()
    expect(page.get_by_role("button", name="Compact rows")).to_have_attribute("aria-pressed", "true")
    low = rows.first.locator("td").last.evaluate("cell => getComputedStyle(cell).paddingTop")
    assert float(low.removesuffix("px")) < float(high.removesuffix("px"))
