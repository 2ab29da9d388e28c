"""Tests of the forms on the pages of `/api/` in a browser."""

from __future__ import annotations

import re

import orjson
import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import ConsoleDesk
from tests.browser.pages import find_colour_violations, find_violations
from tests.browser.people import PASSWORD

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


NO_DEVICE = "/api/devices/00000000-0000-4000-8000-000000000000/"
PRESENT_VERSION = "Show the present version"


def show_answer(page: Page, path: str, status: int, method: str = "GET", body: object = None) -> None:
    """Show the page that a browser gets as the answer to this request; check its status."""

    def send(route: Route) -> None:
        cookies = {one["name"]: one["value"] for one in page.context.cookies()}
        headers = route.request.headers | {
            "x-csrftoken": cookies.get("csrftoken", ""),
            "content-type": "application/json",
            "referer": route.request.url,
        }
        route.fulfill(response=route.fetch(method=method, headers=headers, post_data=orjson.dumps(body)))

    page.route(f"**{path}", send)
    answer = page.goto(path)
    page.unroute(f"**{path}")
    assert answer is not None and answer.status == status, f"{method} {path}: {answer and answer.text()}"


def test_pages_of_refusals_say_what_would_allow_the_action_and_meet_wcag_level_aa(desk: ConsoleDesk) -> None:
    page, viewer = desk.open_as_administrator(), desk.open_as("viewer", PASSWORD)
    rule = f"/api/rules/{desk.product.rows('SELECT uuid::text FROM accelerators_admissionrule')[0][0]}/"
    ((held,),) = desk.product.rows(HELD_DEVICE)
    new_rule = {"name": "new", "action": "ready"}
    cases = (
        (viewer, "/api/rules/", 403, "POST", new_rule, "The role admin would be sufficient."),
        (page, NO_DEVICE, 404, "GET", None, "the address one level above lists what you may see"),
        (page, f"/api/devices/{held}/disable/", 409, "POST", {}, "Read the preview, and send the request again"),
        (page, rule, 409, "PATCH", {"vendor": "10de", "generation": 99}, "somebody changed it. Read it again"),
        (page, rule, 428, "PATCH", {"vendor": "10de"}, "Send the generation that you have read"),
    )
    found: dict[str, list[str]] = {}

    def check(person: Page, path: str, status: int, method: str, body: object, text: str) -> None:
        show_answer(person, path, status, method, body)
        expect(person.locator(".refusal")).to_contain_text(text)
        problems = find_violations(person)
        person.emulate_media(color_scheme="dark")
        problems += find_colour_violations(person)
        person.emulate_media(color_scheme="light")
        if problems:
            found[f"{status} {path}"] = problems

    for case in cases:
        check(*case)
    desk.product.manage("read_only", "on", "--reason", "the database moves")
    try:
        check(page, "/api/rules/", 503, "POST", new_rule, "read only since")
    finally:
        desk.product.manage("read_only", "off")
    assert found == {}
    desk.drop_complaints("status of (40[349]|428|503)")


def test_a_page_says_why_its_actions_are_not_offered(desk: ConsoleDesk) -> None:
    page = desk.open_as("viewer", PASSWORD)
    page.goto("/api/rules/")
    expect(page.get_by_role("button", name="Create")).to_have_count(0)
    page.get_by_text("Why can’t I do more here?").click()
    expect(page.get_by_role("definition")).to_contain_text("The role admin would be sufficient.")
    assert find_violations(page) == []


def test_a_form_based_on_an_older_version_links_to_the_present_one(desk: ConsoleDesk) -> None:
    uuid = desk.product.rows("SELECT uuid::text FROM accelerators_admissionrule ORDER BY id")[0][0]
    page, other = desk.open_as_administrator(), desk.open_as_administrator()
    for one in (page, other):
        one.goto(f"/api/rules/{uuid}/")
    for one, vendor in ((other, "10de"), (page, "1af4")):
        form = one.locator('form[data-method="PATCH"]')
        form.locator("[name=vendor]").fill(vendor)
        form.get_by_role("button", name="Change").click()
    expect(form.locator("output")).to_contain_text("409 – ")
    form.get_by_role("link", name=PRESENT_VERSION).click()
    expect(form.locator("[name=vendor]")).to_have_value("10de")
    desk.drop_complaints("status of 409")


def test_empty_filters_are_not_in_the_address_and_can_be_used_after_going_back(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    page.goto("/api/devices/")
    page.get_by_text("Filter", exact=True).click()
    page.locator("#filter-type").select_option("GPU")
    page.get_by_role("button", name="Show", exact=True).click()
    page.wait_for_url(re.compile(r"/api/devices/\?(.*&)?type=GPU"))
    assert "=&" not in page.url and not page.url.endswith("=")
    page.go_back()
    expect(page.locator("form[data-filter] :disabled")).to_have_count(0)
