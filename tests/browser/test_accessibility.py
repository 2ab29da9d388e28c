"""Tests of the console's accessibility: WCAG 2.1 AA checked by axe, an operator's tasks with the keyboard only (the
focus must be visible, in order and never trapped), reduced motion, and names for screen readers."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ConsoleDesk, first_login
from tests.browser.keyboard import Keyboard
from tests.browser.pages import LISTS, MAIN, find_colour_violations, find_violations, open_page

pytestmark = pytest.mark.browser
INSTALLATION = "cloud"

PAGES = {
    "drivers": f"{LISTS}hostdriver/",
    "driver": f"{LISTS}hostdriver/ →",
    "attach": f"{LISTS}attachment/attach/",
    "manual": "/help/",
    "words": "/help/words/",
    "search": "/help/search/?q=drain",
}
"""Pages that are checked here; `test_pages` checks the main pages, and `test_every_page` all pages."""
DARK_PAGES = ("manual", "words")
FOCUS_SCRIPT = """() => { const one = document.activeElement, style = getComputedStyle(one);
    const box = one.getBoundingClientRect();
    const label = one.labels?.[0]?.textContent ?? one.ariaLabel ?? one.textContent;
    const drawn = one.ownerSVGElement !== undefined && one.matches(":focus-visible");
    const all = [...document.querySelectorAll("a[href], button, input, select, summary, textarea, [tabindex]")];
    return { name: (label || one.value || "").trim(), at: all.indexOf(one), inside: box.width > 0 && box.height > 0,
             seen: drawn || style.outlineStyle !== "none" || style.boxShadow !== "none" }; }"""


def test_pages_meet_wcag_level_aa_in_light_and_dark(desk: ConsoleDesk) -> None:
    found: dict[str, list[str]] = {}
    page = desk.open_as_administrator()
    for name, where in PAGES.items():
        page.emulate_media(color_scheme="light")
        open_page(page, where)
        found[name] = find_violations(page)
        if name in DARK_PAGES:
            page.emulate_media(color_scheme="dark")
            found[f"{name}, dark"] = find_colour_violations(page)
    assert {name: violations for name, violations in found.items() if violations} == {}


def tab_to(page: Page, wanted: str, limit: int = 120) -> None:
    """Press Tab until the focused element has the name `wanted`; check that each stop is visible and after the last."""
    before = -1
    for _ in range(limit):
        page.keyboard.press("Tab")
        now = page.evaluate(FOCUS_SCRIPT)
        assert now["seen"] and now["inside"], f"nobody sees that {now['name']!r} has the focus"
        assert now["at"] > before or now["at"] == 0, f"{now['name']!r} comes out of order"
        before = now["at"]
        if now["name"] == wanted:
            return
    raise AssertionError(f"no way to {wanted!r} with the Tab key")


def test_login_search_and_help_work_by_keyboard_alone(desk: ConsoleDesk) -> None:
    name, password = first_login(desk.product)
    page = desk.open_logged_out()
    page.goto("/admin/")
    for label, text in (("Username", name), ("Password", password)):
        if page.evaluate(FOCUS_SCRIPT)["name"] != label:
            tab_to(page, label)
        page.keyboard.type(text)
    page.keyboard.press("Enter")
    page.wait_for_url("**/admin/")  # wait also for the scripts of the page, which handle the next keys
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.locator("main :focus")).to_have_count(1)  # the link leads over the navigation

    # The palette opens the devices; then a closed dialog must give the focus back.
    page.keyboard.press("Control+k")
    box = page.get_by_role("combobox", name="Go to, or search for")
    expect(box).to_be_focused()
    page.keyboard.type("devic")
    expect(page.get_by_role("option", name="Devices", selected=True)).to_be_visible()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("option", name="Device profiles", selected=True)).to_be_visible()
    assert find_violations(page) == []
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_url("**/device/")
    page.keyboard.press("f")
    page.keyboard.type("Ascend")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=Ascend**")
    page.keyboard.press("j")
    before = page.evaluate(FOCUS_SCRIPT)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert page.evaluate(FOCUS_SCRIPT) == before, "a dialog gives the focus back"


def test_bulk_actions_and_decisions_work_by_keyboard_alone(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    page.goto(f"{LISTS}device/?q=Ascend")
    for key in "jxjxa":
        page.keyboard.press(key)
    expect(page.locator("select[name=action]")).to_be_focused()
    page.keyboard.type("Quar")
    tab_to(page, "Run")
    page.keyboard.press("Enter")
    page.wait_for_url("**/bulk/**")
    assert find_violations(page) == []
    tab_to(page, "Leave them as they are")
    page.keyboard.press("Enter")
    page.wait_for_url("**/device/**")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/change/**")
    tab_to(page, "Reason")
    page.keyboard.type("by hand")
    tab_to(page, "Quarantine")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Now")).to_contain_text("quarantined")


EXPIRE_COMMANDS = """
UPDATE accelerators_command SET start_by = now(), end_by = now() WHERE op = 'configure' AND ended_at IS NULL RETURNING 1
"""


def test_a_rollout_is_previewed_confirmed_and_retried_by_keyboard_alone(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    desk.renew_leases()
    page.goto(f"{LISTS}hostdriver/?q=pci_driver")
    keyboard = Keyboard(page)
    keyboard.press("j", "Enter")
    page.wait_for_url("**/hostdriver/**/change/**")
    keyboard.go_to("Hosts", "select")
    page.keyboard.type("hosts whose names")
    keyboard.go_to("Names of these hosts")
    keyboard.type("cmp0*")
    keyboard.press("Enter")  # Enter in a field decides nothing
    keyboard.go_to("Reason")
    keyboard.type("new cards")
    keyboard.press_button("Install|Disable")
    expect(page.get_by_role("heading", name="What this rollout would do now")).to_be_visible()
    keyboard.check_start()
    assert find_violations(page) == []
    keyboard.go_to("This reaches 6 hosts.*")
    keyboard.type("6")
    keyboard.press_button(r"\w+ on \d of 6")
    now = page.get_by_role("region", name="Now")
    expect(now).to_contain_text("is held by request")  # such hosts are skipped, and two others are begun
    keyboard.check_start()
    assert find_violations(page) == []
    ended = desk.product.rows(EXPIRE_COMMANDS)  # no agent runs there, so these time limits pass at once
    assert len(ended) >= 2, "the rollout changes two hosts at a time, and earlier tests may have changed others"
    expect(page.get_by_role("button", name=re.compile("Retry on the . hosts .*"))).to_be_visible(timeout=60_000)
    keyboard.press_button("Retry on the . hosts .*")
    expect(page.get_by_role("heading", name="What this rollout would do now")).to_be_visible()
    keyboard.follow("Leave them as they are", "**/hostdriver/**")


@pytest.mark.parametrize("where", [MAIN["devices"], MAIN["host"], "/help/words/"])
def test_the_tab_key_leads_through_the_whole_page_and_is_not_trapped(desk: ConsoleDesk, where: str) -> None:
    page = desk.open_as_administrator()
    open_page(page, where)
    tab_to(page, "Skip to content", 1)
    stops, start = 0, page.evaluate(FOCUS_SCRIPT)["at"]
    for _ in range(400):
        page.keyboard.press("Tab")
        stops += 1
        if page.evaluate(FOCUS_SCRIPT)["at"] in (start, -1):
            break
    else:
        raise AssertionError("the focus is caught")
    assert stops > 20


def test_pages_have_no_animation_when_reduced_motion_is_preferred(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    for where in (MAIN["devices"], MAIN["device"], "/help/"):
        open_page(page, where)
        moving = page.evaluate(
            """() => [...document.querySelectorAll("*")].filter(one => { const style = getComputedStyle(one);
                 return style.animationName !== "none" || style.transitionDuration.split(", ").some(d => d !== "0s"); })
               .map(one => one.className)"""
        )
        assert moving == [], where


def test_the_topology_picture_of_a_host_has_roles_and_names_for_screen_readers(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    open_page(page, MAIN["switches"])
    picture = page.get_by_role("group", name="The accelerators of hgx01")
    expect(picture.get_by_role("group", name="NUMA node 0")).to_be_visible()
    expect(picture.get_by_role("img", name="PCI bus").first).to_be_visible()
    expect(picture.get_by_role("img", name="switch").first).to_be_visible()
    expect(picture.get_by_role("link", name="NVIDIA H100").first).to_be_visible()
    units = picture.get_by_role("link").filter(has=page.locator(".cell"))
    rows = page.locator("section[aria-labelledby=functions] tbody tr")
    assert units.count() == rows.count() > 10, "the tables below have every cell of the picture"
