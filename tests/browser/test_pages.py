"""Every page of the console and of the APIs as an administrator sees it: no violation of its policy, no error of a
script; on the main ones WCAG 2.1 AA and no serious barrier by axe, and a picture in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import ConsoleDesk
from tests.browser.pages import MAIN, find_colour_violations, find_violations, first_row, open_page, picture

pytestmark = pytest.mark.browser
INSTALLATION = "cloud"

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
"""Those looked at by axe-core: one of each make."""
DARK_AXE_PAGES = ("login", "overview", "usage", "census", "switches", "devices", "device", "rule", "request", "event")
UNLINKED_PAGES = (
    "/admin/auth/user/add/",
    "/admin/auth/group/",
    "/admin/auth/group/add/",
    "/admin/password_change/",
    "/admin/accelerators/admissionrule/add/",
    "/api/docs/",
    "/v2",
    "/v2/devices",
)
"""What no link of the console's navigation leads to."""


def visit_every_page(page: Page) -> Iterator[str]:
    """Every page in turn; it is on the screen when its address is yielded."""
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
    desk.product.rows("UPDATE agents_lease SET seen_at = now() WHERE seen_at > now() - interval '30 min' RETURNING 1")
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
