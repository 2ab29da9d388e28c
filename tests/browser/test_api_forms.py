"""Tests of the forms on the pages of `/api/` in a browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import ConsoleDesk

pytestmark = pytest.mark.browser
INSTALLATION = "cloud"

HELD_DEVICE = """
SELECT d.uuid::text FROM accelerators_device d JOIN accelerators_deployable p ON p.device_id = d.id
JOIN accelerators_attachhandle h ON h.deployable_id = p.id JOIN accelerators_acceleratorrequest r
ON r.attach_handle_id = h.id WHERE r.state = 'Bound' AND d.state = 'ready' ORDER BY d.id LIMIT 1
"""


def test_an_action_on_a_held_device_is_confirmed_on_the_page_that_refused_it(desk: ConsoleDesk) -> None:
    ((uuid,),) = desk.product.rows(HELD_DEVICE)
    state = f"SELECT state FROM accelerators_device WHERE uuid = '{uuid}'"
    page = desk.open_as_administrator()
    page.goto(f"/api/devices/{uuid}/")
    form = page.locator(f'form[data-url="/api/devices/{uuid}/disable/"]')
    form.get_by_role("button", name="Disable").click()
    expect(form.locator("output")).to_contain_text("1 held device")
    expect(form.locator("output li")).to_have_text("1 × will be done: becomes maintenance (held)")
    assert desk.product.rows(state) == [("ready",)]
    form.get_by_role("button", name="Confirm: do this").click()
    enable = page.locator(f'form[data-url="/api/devices/{uuid}/enable/"]')
    expect(enable).to_be_visible()
    assert desk.product.rows(state) == [("maintenance",)]
    enable.get_by_role("button", name="Enable").click()
    enable.get_by_role("button", name="Confirm: do this").click()
    expect(form).to_be_visible()
    refusals = [complaint for complaint in desk.complaints if "409 (Conflict)" in complaint]
    assert len(refusals) == 2 and refusals == desk.complaints
    desk.complaints.clear()
    assert desk.product.rows(state) == [("ready",)]
