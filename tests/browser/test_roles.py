"""Tests of the console for each role of docs/roles.md: pages that the role may see open, other pages say why not, and
no button is shown that would be refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ConsoleDesk
from tests.browser.pages import MAIN, find_violations, open_page, picture
from tests.browser.people import PASSWORD, PEOPLE, TENANT_PROJECT
from tests.system.product import ROOT

pytestmark = pytest.mark.browser
INSTALLATION = "cloud"

DEVICES = MAIN["devices"]
USERS, TOKENS, ATTACH = "/admin/auth/user/", "/admin/cyborgweb/apitoken/", "/admin/accelerators/attachment/attach/"
ADMIN_BUTTONS = {
    f"{DEVICES}?state=ready →": ("Disable", "Quarantine", "Drain", "retire"),
    f"{DEVICES}?state=maintenance →": ("Enable", "Quarantine", "Retire"),
    DEVICES: ("Run",),
    MAIN["host"]: ("Rescan", "Fetch its log", "Ask for the raw report"),
}
"""Page → buttons that an administrator sees there; a role that may not use a button does not see it."""
ACCESS_ENTRIES = {"API tokens", "Users", "Groups", "Maintenance"}
TENANT_ENTRIES = {"Overview", "Requests", "Device profiles", "Inbox", "Subscriptions", "Deliveries", "Manual"}
NOT_SEEN = "You need membership in the group role:{} or the permission "
TAKES_ADMIN = "You need the role admin or membership in the group role:administrator. Your roles: {}."
TAKES_OPERATOR = "You need the role accelerator_operator or membership in the group role:operator. Your roles: {}."


@dataclass(frozen=True)
class RoleRights:
    """Additional rights of a role that sees all hosts; `role_names` are its roles as the pages list them."""

    role_names: str
    rescans: bool
    sees_access: bool


RIGHTS = {
    "operator": RoleRights("accelerator_operator, member, reader", rescans=True, sees_access=False),
    "auditor": RoleRights("auditor, reader", rescans=False, sees_access=True),
    "viewer": RoleRights("manager, member, reader", rescans=False, sees_access=False),
}


def sidebar_entries(page: Page) -> dict[str, str]:
    """Return label → address of each entry in the sidebar."""
    links = page.get_by_role("navigation", name="Console").get_by_role("listitem").get_by_role("link")
    # The text of an entry begins with the name of its icon, which is hidden from screen readers.
    found = links.evaluate_all("all => all.map(a => [a.innerText.split('\\n').at(-1).trim(), a.href])")
    return {word: address for word, address in found}


def check_every_entry_opens(page: Page) -> None:
    """Check that every entry of the sidebar opens with status 200."""
    refused = {word: page.request.get(address).status for word, address in sidebar_entries(page).items()}
    assert {word: status for word, status in refused.items() if status != 200} == {}


def check_page_is_refused(page: Page, path: str, why: str, heading: str = "Not allowed", status: int = 403) -> None:
    """Check that `path` shows a refusal inside the console's layout, with the reason and a link to the overview."""
    answer = page.goto(path)
    assert answer is not None and answer.status == status, path
    expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    expect(page.get_by_role("main")).to_contain_text(why)
    expect(page.get_by_role("link", name="Back to the overview")).to_be_visible()
    expect(page.locator("p.live")).to_have_count(0)


@pytest.mark.parametrize("name", RIGHTS)
def test_a_role_sees_its_pages_and_no_button_that_would_be_refused(name: str, desk: ConsoleDesk, screens: Path) -> None:
    rights, page = RIGHTS[name], desk.open_as(name, PASSWORD)
    page.goto("/admin/")
    shown = set(sidebar_entries(page))
    assert {"Hosts", "Devices", "Requests", "Events", "Agents"} <= shown
    assert shown & ACCESS_ENTRIES == (ACCESS_ENTRIES if rights.sees_access else set())
    check_every_entry_opens(page)
    picture(page, screens / f"{name}-overview.png")

    open_page(page, MAIN["device"])
    why = page.get_by_text("Why can’t I change anything here?")
    why.click()
    expect(page.get_by_role("main")).to_contain_text(TAKES_ADMIN.format(rights.role_names))
    picture(page, screens / f"{name}-device.png")
    assert find_violations(page) == []
    for where, labels in ADMIN_BUTTONS.items():
        open_page(page, where)
        for label in labels:
            shown_here = rights.rescans and label == "Rescan"
            button = page.get_by_role("button", name=label, include_hidden=True)
            expect(button).to_have_count(int(shown_here))


def test_an_administrator_is_offered_each_button_that_other_roles_are_not(desk: ConsoleDesk) -> None:
    page = desk.open_as_administrator()
    for where, labels in ADMIN_BUTTONS.items():
        open_page(page, where)
        if where == DEVICES:  # its button is visible only after a row and an action are selected
            page.locator("#result_list tbody input[name=_selected_action]").first.check()
            page.get_by_role("combobox", name="Select action to run").select_option(index=1)
        for label in labels:
            expect(page.get_by_role("button", name=label).first, f"{label} of {where}").to_be_visible()


@pytest.mark.parametrize("name", RIGHTS)
def test_a_page_that_a_role_may_not_see_names_the_reason_and_links_to_the_overview(
    name: str, desk: ConsoleDesk, screens: Path
) -> None:
    rights, page = RIGHTS[name], desk.open_as(name, PASSWORD)
    for path in (USERS, TOKENS):
        if rights.sees_access:
            page.goto(path)
            expect(page.locator("#result_list tbody tr").first).to_be_visible()
        else:
            check_page_is_refused(page, path, NOT_SEEN.format("auditor"))
    if rights.rescans:
        page.goto(ATTACH)
        expect(page.get_by_role("button", name="Attach")).to_be_visible()
    else:
        check_page_is_refused(page, ATTACH, TAKES_OPERATOR.format(rights.role_names))
    check_page_is_refused(page, "/admin/auth/user/add/", NOT_SEEN.format("administrator"))
    picture(page, screens / f"{name}-refused.png")
    assert find_violations(page) == []
    desk.drop_complaints("status of 403")


@pytest.mark.parametrize("name", [*RIGHTS, "tenant"])
def test_every_role_has_an_inbox_and_sees_what_would_let_it_subscribe(name: str, desk: ConsoleDesk) -> None:
    page = desk.open_as(name, PASSWORD)
    page.goto("/admin/inbox/")
    expect(page.get_by_role("heading", level=1)).to_have_text("Inbox")
    assert find_violations(page) == []
    page.goto("/admin/cyborgweb/subscription/")
    may_subscribe = name in ("operator", "viewer")
    expect(page.get_by_text("Why can’t I do more here?")).to_have_count(0 if may_subscribe else 1)
    answer = page.goto("/admin/cyborgweb/subscription/add/")
    assert answer is not None and answer.status == (200 if may_subscribe else 403)
    if not may_subscribe:
        expect(page.get_by_role("main")).to_contain_text("You need the role ")
    desk.drop_complaints("status of 403")


@pytest.mark.parametrize("name", RIGHTS)
def test_a_list_says_which_role_may_do_more(name: str, desk: ConsoleDesk, screens: Path) -> None:
    page = desk.open_as(name, PASSWORD)
    page.goto(DEVICES)
    page.get_by_text("Why can’t I do more here?").click()
    expect(page.locator("details.refused")).to_contain_text(TAKES_ADMIN.format(RIGHTS[name].role_names))
    picture(page, screens / f"{name}-list.png")
    assert find_violations(page) == []


def test_an_operator_can_rescan_a_host_and_see_the_command(desk: ConsoleDesk, screens: Path) -> None:
    """An operator finds a host, orders a rescan, sees the command, and is offered to attach devices."""
    page = desk.open_as("operator", PASSWORD)
    page.goto("/admin/")
    page.get_by_role("navigation", name="Console").get_by_role("link", name="Hosts").click()
    page.get_by_role("link", name="cmp02.rack3.example.net").first.click()
    page.locator("#order-reason").fill("a card was added")
    page.get_by_role("button", name="Rescan").click()
    expect(page.get_by_role("main")).to_contain_text("rescan")
    page.get_by_role("navigation", name="Console").get_by_role("link", name="Commands").click()
    placed = page.locator("#result_list tbody tr").filter(has_text="rescan").first
    expect(placed).to_contain_text("cmp02.rack3.example.net")
    picture(page, screens / "operator-commands.png")
    page.goto("/admin/accelerators/attachment/")
    expect(page.get_by_role("link", name=re.compile("^Attach"))).not_to_have_count(0)


def test_a_tenant_sees_its_own_project_s_requests_and_nothing_else(desk: ConsoleDesk, screens: Path) -> None:
    ((other,),) = desk.product.rows("SELECT id FROM accelerators_acceleratorrequest WHERE state = 'Bound' LIMIT 1")
    page = desk.open_as("tenant", PASSWORD)
    page.goto("/admin/")
    assert set(sidebar_entries(page)) == TENANT_ENTRIES
    check_every_entry_opens(page)
    picture(page, screens / "tenant-overview.png")
    page.get_by_role("navigation", name="Console").get_by_role("link", name="Requests").click()
    rows = page.locator("#result_list tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="BindFailed")).to_have_count(1)
    expect(rows.filter(has_text="Initial")).to_have_count(1)
    picture(page, screens / "tenant-requests.png")
    for path in (DEVICES, MAIN["hosts"], MAIN["events"], USERS):
        check_page_is_refused(page, path, NOT_SEEN.format("auditor" if path == USERS else "viewer"))
    removed = f"There is no accelerator request '{other}'; perhaps it was removed."
    check_page_is_refused(page, f"/admin/accelerators/acceleratorrequest/{other}/change/", removed, "Not found", 404)
    picture(page, screens / "tenant-refused.png")
    desk.drop_complaints("status of 40[34]")


def test_these_tests_cover_every_role_of_the_manual() -> None:
    in_table = re.findall(r"^\|.*\| `(role:\w+|project:)`", (ROOT / "docs" / "roles.md").read_text(), re.MULTILINE)
    assert set(in_table) == {"role:administrator", *(one.removesuffix(TENANT_PROJECT) for one in PEOPLE.values())}
