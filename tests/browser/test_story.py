"""Tests of an operator's usual tasks: log in, find a device, make it ready; also without JavaScript or without a mouse;
and choose a theme."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ConsoleDesk, first_login, log_in

pytestmark = pytest.mark.browser
INSTALLATION = "plain"

DEVICES = "/admin/accelerators/device/"


def open_fake_device(page: Page) -> None:
    """Follow the links from the overview to the page of the fake device."""
    page.goto("/admin/")
    page.get_by_role("navigation", name="Console").get_by_role("link", name="Devices").click()
    page.get_by_role("link", name="localhost").click()
    page.get_by_role("link", name="miss model info").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("miss model info")


def submit_decision(page: Page, choice: str, why: str) -> None:
    """Fill in the reason and press the button `choice` on the open device page."""
    page.locator("#reason").fill(why)
    page.get_by_role("button", name=choice, exact=True).click()


def check_state_and_reason(page: Page, state: str, why: str) -> None:
    """Check that the device page shows the state and the reason, and an event with the reason."""
    now = page.get_by_role("region", name="Now")
    expect(now).to_contain_text(state)
    expect(now).to_contain_text(why)
    expect(page.get_by_role("region", name="Events")).to_contain_text(why)


def test_a_wrong_password_is_refused_and_the_right_one_logs_in(desk: ConsoleDesk) -> None:
    page = desk.open_logged_out()
    page.goto(DEVICES)
    expect(page).to_have_url(re.compile(rf"/admin/login/\?next={DEVICES}"))
    page.get_by_label("Username").fill("admin")
    page.get_by_label("Password").fill("wrong")
    page.get_by_label("Password").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Please enter the correct username and password")
    log_in(page, *first_login(desk.product))
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")


def test_enabling_a_device_makes_it_ready_with_the_given_reason(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    open_fake_device(page)
    expect(page.get_by_role("region", name="Now")).to_contain_text("inactive")
    submit_decision(page, "Enable", "burnt in over night")
    check_state_and_reason(page, "ready", "burnt in over night")


def test_login_decisions_and_search_work_without_javascript(desk: ConsoleDesk) -> None:
    page = desk.open_logged_out(java_script_enabled=False)
    log_in(page, *first_login(desk.product))
    open_fake_device(page)
    submit_decision(page, "Quarantine", "smells of smoke")
    check_state_and_reason(page, "quarantined", "smells of smoke")
    submit_decision(page, "Release", "it was the toast")
    check_state_and_reason(page, "maintenance", "it was the toast")
    page.goto(f"{DEVICES}?q=nothing+like+this")
    expect(page.get_by_role("heading", name="Nothing matches")).to_be_visible()
    page.get_by_role("link", name="Show all", exact=True).first.click()
    expect(page.locator("#result_list tbody tr")).to_have_count(1)
    for one in page.get_by_role("navigation", name="Console").get_by_role("link").all():
        expect(one).to_be_visible()


def tab_to(page: Page, wanted: str, limit: int = 80) -> None:
    """Press Tab until the focused element has the name `wanted`; check that the focus is visible at each stop."""
    for _ in range(limit):
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(
            """() => { const one = document.activeElement, style = getComputedStyle(one);
                       const label = one.labels?.[0]?.textContent ?? one.ariaLabel ?? one.textContent;
                       const drawn = one.ownerSVGElement !== undefined && one.matches(":focus-visible");
                       return [label.trim(), drawn || style.outlineStyle !== "none" || style.boxShadow !== "none"]; }"""
        )
        assert outlined, f"nobody sees that {name!r} has the focus"
        if name == wanted:
            return
    raise AssertionError(f"no way to {wanted!r} with the Tab key")


def test_a_device_can_be_found_and_quarantined_without_a_mouse(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    page.goto("/admin/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    tab_to(page, "Hosts")
    page.keyboard.press("Enter")
    page.wait_for_url("**/host/")
    tab_to(page, "localhost")
    page.keyboard.press("Enter")
    page.wait_for_url("**/change/")
    tab_to(page, "miss model info")
    page.keyboard.press("Enter")
    page.wait_for_url("**/device/**")
    tab_to(page, "Reason")
    page.keyboard.type("by hand")
    tab_to(page, "Quarantine")
    page.keyboard.press("Enter")
    check_state_and_reason(page, "quarantined", "by hand")


def is_dark(page: Page) -> bool:
    """Return whether the background of the page is nearly black."""
    ground: Any = page.evaluate(
        """() => { const spot = document.createElement("canvas").getContext("2d");
                   spot.fillStyle = getComputedStyle(document.body).backgroundColor; spot.fillRect(0, 0, 1, 1);
                   return Array.from(spot.getImageData(0, 0, 1, 1).data).slice(0, 3); }"""
    )
    return max(ground) < 80


def test_a_chosen_theme_applies_to_all_pages_of_that_browser_only(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator(color_scheme="light")
    page.goto("/admin/")
    assert not is_dark(page)
    page.locator("details.who summary").click()
    page.get_by_role("button", name="Dark").click()
    for path in ("/admin/", DEVICES, "/api/"):
        page.goto(path)
        assert is_dark(page), path
    other = desk.open_as_administrator(color_scheme="light")
    other.goto("/admin/")
    assert not is_dark(other)
