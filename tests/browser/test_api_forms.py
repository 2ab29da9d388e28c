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


FREE_DEVICE = """
SELECT d.uuid::text FROM accelerators_device d WHERE d.state = 'ready' AND NOT EXISTS (
SELECT FROM accelerators_deployable p JOIN accelerators_acceleratorrequest r ON r.deployable_id = p.id
WHERE p.device_id = d.id) ORDER BY d.id LIMIT 1
"""


def test_a_bulk_action_is_previewed_and_confirmed_on_the_page_of_the_bulk_actions(desk: ConsoleDesk) -> None:
    ((uuid,),) = desk.product.rows(FREE_DEVICE)
    page = desk.open_as_administrator()
    for action, text in (("disable", "becomes maintenance"), ("enable", "becomes ready")):
        page.goto("/api/bulk_actions/")
        form = page.locator('form[data-url="/api/bulk_actions/"]')
        form.get_by_label("action", exact=True).select_option(action)
        form.get_by_label("devices", exact=True).fill(f'["{uuid}"]')
        form.get_by_label("dry_run", exact=True).select_option("yes")
        form.get_by_role("button", name="Create").click()
        expect(form.locator("output")).to_contain_text("200 – Nothing was done.")
        expect(form.locator("output li")).to_have_text(f"1 × will be done: {text}")
        form.get_by_role("button", name="Confirm: do this").click()
        expect(form.locator("output")).to_be_empty()
        newest = "SELECT action, state, moved FROM accelerators_bulk ORDER BY id DESC LIMIT 1"
        assert desk.product.rows(newest) == [(action, "done", 1)]


def test_a_form_that_changes_a_member_sends_only_the_choices_that_were_edited(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    page.goto("/api/rules/")
    form = page.locator('form[data-url="/api/rules/"]')
    form.get_by_label("name", exact=True).fill("api-form")
    form.get_by_label("host", exact=True).fill("nowhere")
    form.get_by_label("action", exact=True).select_option("ready")
    form.get_by_role("button", name="Create").click()
    change = page.locator("form[data-method=PATCH]")
    expect(change.get_by_label("enabled", exact=True)).to_have_value("true")
    change.get_by_label("enabled", exact=True).select_option("no")
    with page.expect_request(lambda request: request.method == "PATCH") as sent:
        change.get_by_role("button", name="Change").click()
    expect(change.get_by_label("enabled", exact=True)).to_have_value("false")
    assert sent.value.post_data_json == {"enabled": False, "generation": 1}
