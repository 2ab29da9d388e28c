"""Tests that open pages show changes of hardware and of other users, and recover from outages, without a reload."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from playwright.sync_api import Locator, Page, expect

from cyborgweb.database.postgres import choose_socket_folder
from tests.browser.conftest import ConsoleDesk, Hardware
from tests.support.webserver import until
from tests.system.product import Product

pytestmark = pytest.mark.browser
INSTALLATION = "live"

DEVICES = "/admin/accelerators/device/"
CARDS = ("0000:0c:00.0", "0000:0d:00.0", "0000:0e:00.0")
FOURTH_CARD = "0000:0f:00.0"
TERMINATE_CONNECTIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'cyborg'"


@pytest.fixture(autouse=True)
def _cards(product: Product, hardware: Hardware) -> None:
    """Plug in all cards again, whatever the last test did, and wait until the product knows them."""
    hardware("reset")
    hardware("count", str(len(CARDS)))
    until(lambda: all(stored_states(product).get(card, "missing") != "missing" for card in CARDS), 60)


def stored_states(product: Product) -> dict[str, str]:
    """Return address → state of all devices in the database."""
    return dict(product.rows("SELECT address, state FROM accelerators_device"))


def open_live_list(desk: ConsoleDesk) -> Page:
    """Open the list of devices, wait until it is live, and set a mark that a reload would remove."""
    page = desk.open_as_administrator()
    page.goto(DEVICES)
    expect(live_badge(page)).to_contain_text("live")
    page.evaluate("window.sameAsBefore = true")
    return page


def live_badge(page: Page) -> Locator:
    """Return the badge that shows whether the page is live."""
    return page.locator("p.live")


@contextmanager
def database_outage(product: Product) -> Iterator[None]:
    """Close all connections to the database and refuse new ones inside the context."""
    where = str(choose_socket_folder(product.state / "postgres" / "run"))
    with psycopg.connect(host=where, user="postgres", dbname="postgres", autocommit=True) as connection:
        connection.execute("ALTER DATABASE cyborg ALLOW_CONNECTIONS false")
        try:
            connection.execute(TERMINATE_CONNECTIONS)
            yield
        finally:
            connection.execute("ALTER DATABASE cyborg ALLOW_CONNECTIONS true")


def device_row(page: Page, card: str) -> Locator:
    """Return the row of a device in the list."""
    return page.locator("#result_list tbody tr").filter(has_text=card)


def check_page_shows_stored_states(page: Page, product: Product) -> None:
    """Check that every row shows the stored state, and that the page was not reloaded."""
    for card, state in stored_states(product).items():
        expect(device_row(page, card)).to_contain_text(state)
    assert page.evaluate("window.sameAsBefore"), "the page was loaded anew"


def test_the_device_list_shows_plugged_and_unplugged_devices_without_a_reload(
    desk: ConsoleDesk, hardware: Hardware
) -> None:
    page = open_live_list(desk)
    hardware("unplug", "0")
    expect(device_row(page, CARDS[0])).to_contain_text("missing")
    hardware("plug", "0")
    expect(device_row(page, CARDS[0])).not_to_contain_text("missing")
    check_page_shows_stored_states(page, desk.product)
    hardware("count", str(len(CARDS) + 1))
    live_badge(page).get_by_role("link", name="1 new").click()
    expect(device_row(page, FOURTH_CARD)).to_be_visible()
    hardware("unplug", str(len(CARDS)))
    expect(device_row(page, FOURTH_CARD)).to_contain_text("missing")


def test_a_first_step_ticks_itself_on_an_open_overview(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    desk.product.rows("UPDATE accelerators_device SET state = 'inactive' WHERE state <> 'missing' RETURNING 1")
    page.goto("/admin/")
    expect(live_badge(page)).to_contain_text("live")
    step = page.get_by_role("region", name="First steps").get_by_role("listitem").filter(has_text="Admit a device")
    expect(step).to_contain_text("to do")
    page.evaluate("window.sameAsBefore = true")
    desk.product.rows("UPDATE accelerators_device SET state = 'ready' WHERE state <> 'missing' RETURNING 1")
    expect(step).to_contain_text("done")
    assert page.evaluate("window.sameAsBefore"), "the page was loaded anew"
    desk.product.rows("UPDATE accelerators_device SET state = 'inactive' WHERE state <> 'missing' RETURNING 1")


def test_a_device_page_shows_the_decision_of_another_user_without_a_reload(desk: ConsoleDesk) -> None:
    page, other = open_live_list(desk), desk.open_as_administrator()
    for one in (page, other):
        one.goto(DEVICES)
        device_row(one, CARDS[2]).get_by_role("link", name="miss model info").click()
    expect(live_badge(page)).to_contain_text("live")
    other.locator("#reason").fill("seen by the other one")
    other.get_by_role("button", name="Enable", exact=True).click()
    expect(page.get_by_role("region", name="Now")).to_contain_text("seen by the other one")


def test_a_live_update_keeps_focus_selection_scroll_position_open_parts_and_typed_text(desk: ConsoleDesk) -> None:
    page = open_live_list(desk)
    device_row(page, CARDS[2]).get_by_role("link", name="miss model info").click()
    expect(live_badge(page)).to_contain_text("live")
    page.locator("#reason").fill("half a sentence")
    page.locator("details.stored summary").click()
    page.mouse.move(0, 0)
    page.evaluate("getSelection().selectAllChildren(document.querySelector('h1')); scrollTo(0, 60)")
    look = """() => [document.activeElement.textContent, String(getSelection()), scrollY,
        document.querySelector("details.stored").open, document.querySelector("#reason").value]"""
    before = page.evaluate(look)
    desk.product.rows("UPDATE accelerators_device SET state_reason = 'seen again' RETURNING 1")
    expect(page.locator("main")).to_contain_text("seen again")
    assert page.evaluate(look) == before
    assert before[0].startswith("The stored inventory") and before[1:] == [before[1], 60, True, "half a sentence"]
    assert before[1]


def test_keyboard_focus_stays_on_its_device_when_another_row_moves(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    ((host,),) = desk.product.rows("SELECT id FROM accelerators_host")
    page.goto(f"/admin/accelerators/host/{host}/change/")
    expect(live_badge(page)).to_contain_text("live")
    rows = page.locator("section[aria-labelledby=devices] tbody tr")
    rows.filter(has_text=CARDS[1]).get_by_role("link").focus()
    desk.product.rows("UPDATE accelerators_device SET numa_node = 0 WHERE address = %s RETURNING 1", CARDS[2])
    expect(rows.first).to_contain_text(CARDS[2])
    focused_row = page.evaluate("document.activeElement.closest('tr')?.textContent")
    assert CARDS[1] in (focused_row or "nowhere")


def test_a_live_page_reconnects_after_the_web_process_was_killed_and_catches_up(
    desk: ConsoleDesk, hardware: Hardware
) -> None:
    page = open_live_list(desk)
    web = desk.product.child("web")
    assert web
    os.kill(web.pid, signal.SIGSTOP)
    hardware("unplug", "1")
    os.kill(web.pid, signal.SIGKILL)
    expect(live_badge(page)).to_contain_text("reconnecting")
    expect(live_badge(page)).to_have_text("●live", timeout=60_000)
    until(lambda: stored_states(desk.product)[CARDS[1]] == "missing", 30)
    check_page_shows_stored_states(page, desk.product)
    desk.drop_complaints("WebSocket connection|Failed to load resource|ERR_")


def test_a_live_page_shows_that_it_is_stale_while_the_database_is_away(desk: ConsoleDesk, hardware: Hardware) -> None:
    """All connections to the database are closed, also the one of the hub that sends changes to pages."""
    page = open_live_list(desk)
    hardware("unplug", "2")
    with database_outage(desk.product):
        expect(live_badge(page)).to_contain_text("stale since", timeout=60_000)
    expect(live_badge(page)).to_have_text("●live", timeout=60_000)
    until(lambda: stored_states(desk.product)[CARDS[2]] == "missing", 30)
    check_page_shows_stored_states(page, desk.product)
    desk.drop_complaints("WebSocket connection|Failed to load resource")


def test_a_bulk_action_skips_a_device_that_changed_after_it_was_selected(desk: ConsoleDesk) -> None:
    page, other = desk.open_as_administrator(), desk.open_as_administrator()
    page.goto(DEVICES)
    for card in CARDS[:2]:
        device_row(page, card).get_by_role("checkbox").check()
    page.locator("select[name=action]").select_option(label="Quarantine")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("2 devices")
    page.locator("#reason").fill("second come")
    other.goto(DEVICES)
    device_row(other, CARDS[0]).get_by_role("link", name="miss model info").click()
    other.locator("#reason").fill("first come")
    other.get_by_role("button", name="Enable", exact=True).click()
    expect(other.get_by_role("region", name="Now")).to_contain_text("ready")
    page.get_by_role("button", name="of 2").click()
    outcome = page.get_by_role("region", name="Outcome of each device")
    expect(outcome.get_by_role("row").filter(has_text=CARDS[1])).to_contain_text("done")
    expect(outcome.get_by_role("row").filter(has_text=CARDS[0])).to_contain_text("Look at it again")


def test_search_shortcuts_and_the_palette_lead_from_any_page_to_another(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    page.goto("/admin/accelerators/event/")
    page.keyboard.press("/")
    page.keyboard.type(CARDS[1])
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text(CARDS[1])
    page.wait_for_load_state()  # the script that listens for keys is deferred: it runs after the heading is there
    page.keyboard.press("g")
    page.keyboard.press("d")
    page.wait_for_url(f"**{DEVICES}")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.locator("#result_list tbody tr").nth(1).get_by_role("checkbox")).to_be_checked()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.keyboard.type("agen")
    page.keyboard.press("Enter")
    page.wait_for_url("**/agents/agent/")
