"""Tests of an operator's main tasks with the keyboard only: join a host, admit a device and an agent, make a profile,
attach and detach, roll out a change of a driver, make a rule, subscribe. `Keyboard` checks the focus at each stop."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import ConsoleDesk
from tests.browser.keyboard import Keyboard
from tests.support.cloud import SimulatedCloud, running_cloud
from tests.support.webserver import until
from tests.system.conftest import fresh_folder
from tests.system.product import Product, running

pytestmark = pytest.mark.browser

JOB_S = 60.0
"""Seconds until a job or a command has ended."""


@pytest.fixture(scope="module")
def cloud() -> Iterator[SimulatedCloud]:
    with running_cloud() as one:
        yield one


@pytest.fixture(scope="module")
def _desk_of_module(browser: Browser, cloud: SimulatedCloud) -> Iterator[ConsoleDesk]:
    settings = {"CYBORG_ENABLED_DRIVERS": "fake_driver"} | cloud.settings
    with fresh_folder() as folder, running(Product(folder / "state", settings)) as product:
        ((host,),) = until(lambda: product.rows("SELECT name FROM accelerators_host"), JOB_S)
        cloud.create_compute_provider(host)
        until(lambda: product.rows("SELECT FROM accelerators_device"), JOB_S)
        desk = ConsoleDesk(product, browser)
        yield desk
        desk.close()


def open_by_keyboard(page: Page, entry: str, address: str) -> Keyboard:
    """Open the overview and follow the sidebar's entry; return the keyboard of the page."""
    page.goto("/admin/")
    keyboard = Keyboard(page)
    keyboard.check_start()
    assert keyboard.step()["name"] == "Skip to content"
    keyboard.follow(entry, address)
    return keyboard


def skip_to_content(keyboard: Keyboard) -> None:
    """Follow the page's first link, which leads past its navigation."""
    assert keyboard.step()["name"] == "Skip to content"
    keyboard.press("Enter")
    keyboard.step()
    is_inside = keyboard.page.evaluate(
        "document.querySelector('main, #main, #content').contains(document.activeElement)"
    )
    assert is_inside, "the link skips the navigation"


def test_a_host_is_joined_with_the_keyboard(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator(permissions=["clipboard-read", "clipboard-write"])
    keyboard = open_by_keyboard(page, "Join tokens", "**/jointoken/")
    keyboard.follow("Add join token", "**/jointoken/add/")
    keyboard.check_focused("Host")
    keyboard.type("new-01.example.net")
    keyboard.go_to("Valid for how many hours")
    keyboard.press("ArrowUp")
    keyboard.go_to("Address of the conductor")
    keyboard.type(desk.address)
    keyboard.press_button("Make the token")
    expect(page.get_by_role("heading", name="The token is shown only now")).to_be_visible()
    keyboard.check_start()
    skip_to_content(keyboard)
    keyboard.press_button("Copy the command")
    expect(page.get_by_text("Copied.")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert re.fullmatch(r"CYBORG_JOIN_TOKEN=\S+ cyborg-agent", copied)
    assert copied == page.locator("#join-command").inner_text()
    keyboard.follow("Agents", "**/agent/")


def test_a_device_is_admitted_with_the_keyboard(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    keyboard = open_by_keyboard(page, "Devices", "**/device/")
    skip_to_content(keyboard)
    keyboard.follow(".*miss model info.*", "**/device/**/change/")
    skip_to_content(keyboard)
    keyboard.go_to("Reason")
    keyboard.type("burnt in over night")
    keyboard.press("Enter")  # Enter in the field decides nothing
    keyboard.go_to("Enable", "button")
    keyboard.press("Space")
    now = page.get_by_role("region", name="Now")
    expect(now).to_contain_text("ready")
    expect(now).to_contain_text("burnt in over night")
    keyboard.check_start()


def test_an_agent_that_was_barred_is_admitted_with_the_keyboard(desk: ConsoleDesk) -> None:
    desk.product.rows("UPDATE agents_agent SET barred = 'clone', barred_reason = 'two hosts have its key' RETURNING 1")
    page = desk.open_as_administrator()
    keyboard = open_by_keyboard(page, "Agents", "**/agent/")
    expect(page.locator("#result_list tbody tr")).to_contain_text("clone")
    keyboard.press("j", "x")
    keyboard.press("a")
    expect(page.locator("select[name=action]")).to_be_focused()
    keyboard.page.keyboard.type("Admit")
    keyboard.press_button("Run")
    expect(page.get_by_text("1 agent admitted")).to_be_visible()
    keyboard.check_start()
    assert desk.product.rows("SELECT barred FROM agents_agent") == [("",)]


def test_a_profile_is_created_with_the_keyboard(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    keyboard = open_by_keyboard(page, "Device profiles", "**/deviceprofile/")
    keyboard.follow("Add device profile", "**/deviceprofile/add/")
    keyboard.check_focused("Name")
    keyboard.type("fpga-keys")
    keyboard.go_to("Resource class")
    keyboard.type("FPGA")
    keyboard.go_to("Number of accelerators")
    keyboard.press("ArrowUp", "ArrowDown")
    keyboard.go_to("Other traits and hints")
    keyboard.type("trait:CUSTOM_FAKE_DEVICE=required")
    keyboard.go_to("Create", "button", key="Tab")
    keyboard.go_to("Number of accelerators", key="Shift+Tab")
    keyboard.press_button("Create")
    keyboard.arrive(re.compile(r"/deviceprofile/[^/]+/change/"))
    expect(page.get_by_role("heading", level=1)).to_have_text("fpga-keys")


def test_a_device_is_attached_and_detached_with_the_keyboard(desk: ConsoleDesk, cloud: SimulatedCloud) -> None:
    ((device,),) = desk.product.rows("SELECT uuid::text FROM accelerators_device")
    desk.product.manage("device", "enable", device, "--wait")
    until(lambda: not desk.product.rows("SELECT FROM accelerators_intent WHERE kind = 'provider'"), JOB_S)
    ((host, provider),) = (
        (one.name, one.uuid) for one in cloud.placement.session.model.providers.values() if not one.parent
    )
    instance = cloud.boot_instance(host, provider)
    page = desk.open_as_administrator()
    keyboard = open_by_keyboard(page, "Attachments", "**/attachment/")
    skip_to_content(keyboard)
    keyboard.follow("Attach to a running instance", "**/attachment/attach/")
    keyboard.check_focused("Instance")
    keyboard.type(instance)
    keyboard.go_to("Or one unit of this device")
    keyboard.type(device)
    keyboard.go_to("Reason")
    keyboard.type("more throughput")
    keyboard.press_button("Attach")
    now = page.get_by_role("region", name="Now")
    expect(now).to_contain_text("attached", timeout=1000 * JOB_S)
    keyboard.check_start()
    skip_to_content(keyboard)
    keyboard.follow("Detach…", "**/detach/")
    keyboard.type(instance[:8])
    keyboard.go_to("Reason")
    keyboard.type("it is done")
    keyboard.press_button("Detach")
    expect(now).to_contain_text("detached", timeout=1000 * JOB_S)
    keyboard.check_start()


def test_a_driver_is_changed_by_a_rollout_with_the_keyboard(desk: ConsoleDesk) -> None:
    desk.product.rows("UPDATE accelerators_device SET state = 'inactive' WHERE state = 'ready' RETURNING 1")
    page = desk.open_as_administrator()
    keyboard = open_by_keyboard(page, "Drivers", "**/hostdriver/")
    skip_to_content(keyboard)
    keyboard.follow("fake_driver", "**/hostdriver/**/change/")
    skip_to_content(keyboard)
    keyboard.go_to("Hosts", "select")
    keyboard.press("ArrowDown")
    keyboard.go_to("Hosts at a time")
    keyboard.type("2")
    keyboard.go_to("continue with other hosts.*")
    keyboard.press("Space")
    keyboard.go_to("Reason")
    keyboard.type("the driver is tried again")
    keyboard.press_button("Disable")
    now = page.get_by_role("region", name="Now")
    expect(now).to_contain_text("1 done", timeout=1000 * JOB_S)
    expect(now).to_contain_text("took", timeout=1000 * JOB_S)
    keyboard.check_start()


def test_a_live_page_leaves_the_focus_where_it_is(desk: ConsoleDesk) -> None:
    """While the page replaces its content, the Tab key goes on from where the person was."""
    page = desk.open_as_administrator()
    keyboard = open_by_keyboard(page, "Devices", "**/device/")
    expect(page.locator("p.live")).to_contain_text("live")
    keyboard.press("j")
    before = keyboard.read_focus()
    place = page.evaluate("[scrollX, scrollY]")
    desk.product.rows("UPDATE accelerators_device SET status_reason = 'warm', state_reason = 'seen again' RETURNING 1")
    desk.product.rows("UPDATE accelerators_device SET model = 'another name' RETURNING 1")
    expect(page.locator("#result_list tbody")).to_contain_text("another name")
    now = keyboard.read_focus()
    assert (now["kind"], now["at"]) == (before["kind"], before["at"])
    assert page.evaluate("[scrollX, scrollY]") == place
    assert keyboard.step()["at"] > now["at"]
    desk.product.rows("UPDATE accelerators_device SET model = 'miss model info 0xABCD' RETURNING 1")


def test_a_rule_is_made_with_the_keyboard(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    keyboard = open_by_keyboard(page, "Admission rules", "**/admissionrule/")
    keyboard.follow("Add admission rule", "**/admissionrule/add/")
    keyboard.check_focused("Name*")
    keyboard.press_button("Save")
    expect(page.get_by_text("Please correct the error")).to_be_visible()
    keyboard.check_focused("Name*")
    keyboard.type("by-keys")
    keyboard.go_to(r"Action\*")
    page.keyboard.type("ready")
    keyboard.go_to("Driver")
    keyboard.type("fake_driver")
    keyboard.go_to("Enabled")
    keyboard.press("Space")
    keyboard.press_button("Save")
    keyboard.arrive("**/admissionrule/")
    assert desk.product.rows("SELECT enabled FROM accelerators_admissionrule WHERE name = 'by-keys'") == [(False,)]


def test_a_subscription_is_made_with_the_keyboard(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    keyboard = open_by_keyboard(page, "Subscriptions", "**/subscription/")
    keyboard.follow("Add subscription", "**/subscription/add/")
    keyboard.check_focused("Name*")
    keyboard.type("by keys")
    keyboard.go_to("device.failed: .*")
    keyboard.press("Space")
    keyboard.go_to(r"Way\*?")
    page.keyboard.type("inbox")
    keyboard.press_button("Save")
    keyboard.arrive("**/subscription/")
    assert desk.product.rows("SELECT kinds FROM cyborgweb_subscription WHERE name = 'by keys'") == [
        (["device.failed"],)
    ]


def test_filters_and_the_account_menu_open_and_close_with_the_keyboard(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto("/admin/accelerators/device/")
    keyboard = Keyboard(page)
    keyboard.go_to("Filters")
    keyboard.press("Enter")
    filters = page.locator("#changelist-filter")
    expect(filters).to_be_visible()
    expect(filters.locator(":focus")).to_have_count(1)
    keyboard.press("Escape")
    expect(filters).to_be_hidden()
    keyboard.check_focused("Filters")
    keyboard.press("Space")
    keyboard.follow("inactive", re.compile(r"\?state__exact=inactive"))
    page.goto("/admin/accelerators/device/")
    keyboard.go_to("Your account and theme")
    keyboard.press("Enter")
    expect(page.locator("#logout-form")).to_be_visible()
    expect(page.locator("#nav-sidebar-inner nav :focus")).to_have_count(1)
    keyboard.go_to("Dark")
    keyboard.press("Enter")
    assert page.evaluate("document.documentElement.classList.contains('dark')")
    keyboard.press("Escape")
    expect(page.locator("#logout-form")).to_be_hidden()
    keyboard.check_focused("Your account and theme")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("path", ["/admin/", "/admin/accelerators/device/", "/admin/accelerators/admissionrule/add/"])
def test_the_focus_leads_through_a_page_of_any_width_and_out_of_it(desk: ConsoleDesk, path: str, width: int) -> None:
    page = desk.open_as_administrator()
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(path)
    assert Keyboard(page).leave_page() > 5


def test_a_refused_form_has_the_focus_at_its_reason_and_one_with_a_wrong_field_at_this_field(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    page.goto("/admin/accelerators/attachment/attach/")
    keyboard = Keyboard(page)
    keyboard.check_focused("Instance")
    keyboard.type("no uuid")
    keyboard.press_button("Attach")
    expect(page.get_by_role("alert")).to_be_focused()
    keyboard.go_to("Instance")
    page.goto("/admin/accelerators/admissionrule/add/")
    keyboard.check_focused(r"Name*")
    keyboard.type("not / allowed")
    keyboard.go_to("Driver")
    keyboard.type("fake_driver")
    keyboard.press("Enter")
    expect(page.locator(".errornote")).to_be_visible()
    keyboard.check_focused(r"Name*")
