"""Tests of the usage chart of a device, which is drawn live, and of a census that is started with the keyboard."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import ConsoleDesk
from tests.support.webserver import until

pytestmark = pytest.mark.browser
INSTALLATION = "plain"


def test_the_usage_chart_follows_samples_and_survives_a_refresh_of_the_page(desk: ConsoleDesk) -> None:
    until(lambda: desk.product.rows("SELECT 1 FROM accelerators_device"), 60)
    ((key,),) = desk.product.rows("SELECT id FROM accelerators_device LIMIT 1")
    page = desk.open_as_administrator()
    page.goto(f"/admin/accelerators/device/{key}/change/")
    expect(page.locator("[data-state]")).to_contain_text("live, each second")
    chart = page.locator(".charts figure").first
    expect(chart).to_contain_text("utilization")
    line = chart.locator("path").last
    before = line.get_attribute("d")
    page.evaluate("window.sameChart = document.querySelector('.charts svg')")
    page.get_by_label("Reason").first.fill("burnt in")
    desk.product.rows("UPDATE accelerators_device SET state_reason = 'looked at' RETURNING 1")
    page.get_by_label("Reason").first.fill("")
    page.locator("h1").click()
    expect(page.locator("main")).to_contain_text("looked at")
    expect(line).not_to_have_attribute("d", before or "")
    assert page.evaluate("window.sameChart === document.querySelector('.charts svg')")
    assert "%" in (chart.locator("svg").get_attribute("aria-label") or "")


def test_a_census_can_be_started_with_the_keyboard_alone(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    page.goto("/admin/census/")
    page.get_by_label("Number of requests").press("Enter")
    expect(page.locator("#found")).to_contain_text("1 answered")
    expect(page.locator(".census")).to_contain_text("it has no free unit that is ready and fits")
