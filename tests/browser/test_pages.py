"""Every page of the console and of the APIs as an administrator sees it: no violation of its policy, no error of a
script; on the main ones no serious barrier to who cannot see them, and a picture in light and dark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import Desk
from tests.system.product import ROOT, Product, environment

pytestmark = pytest.mark.browser

LISTS = "/admin/accelerators/"
MAIN = {
    "login": "/admin/",
    "overview": "/admin/",
    "usage": "/admin/usage/?by=host&then=type",
    "census": "/admin/census/",
    "hosts": f"{LISTS}host/",
    "host": f"{LISTS}host/?q=cmp02 →",
    "switches": f"{LISTS}host/?q=hgx →",
    "devices": f"{LISTS}device/",
    "device": f"{LISTS}device/?q=BlueField →",
    "rules": f"{LISTS}admissionrule/",
    "rule": f"{LISTS}admissionrule/ →",
    "requests": f"{LISTS}acceleratorrequest/",
    "request": f"{LISTS}acceleratorrequest/?state=Bound →",
    "commands": f"{LISTS}command/",
    "events": f"{LISTS}event/",
    "event": f"{LISTS}event/ →",
    "intents": f"{LISTS}intent/",
    "placement": "/admin/placement_sync/tree/",
    "agents": "/admin/agents/agent/",
    "user": "/admin/auth/user/ →",
    "api": "/api/",
    "api-devices": "/api/devices/",
}
"""Where each is; with an arrow what the list's first row leads to."""
HEARD = (
    "login",
    "overview",
    "usage",
    "census",
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
DARK = ("login", "overview", "usage", "census", "switches", "devices", "device", "request", "event")
OTHERS = (
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
FOREIGN = {"aria-prohibited-attr": "help-tooltip"}
"""Findings in markup that is not ours: rule, and what is in the element. Django's own script writes these icons
(SelectFilter2.js, beside the lists of groups and permissions); what they say stands beside them as text, too."""


@pytest.fixture(scope="module", autouse=True)
def _cloud(product: Product) -> None:
    known = environment(CYBORG_STATE_DIR=str(product.state))
    subprocess.run([sys.executable, "-m", "tests.browser.sample"], check=True, cwd=ROOT, env=known)


def first_row(page: Page) -> str | None:
    """The page that the first row of the list on screen leads to."""
    link = page.locator("#result_list tbody a[href*='/change/']").first
    return urlsplit(link.evaluate("a => a.href")).path if link.count() else None


def open_page(page: Page, where: str) -> None:
    """One of MAIN."""
    path, _, first = where.partition(" ")
    page.goto(path)
    if first:
        row = first_row(page)
        assert row, f"{path} shows no row that could be opened"
        page.goto(row)


def everything(page: Page) -> Iterator[str]:
    """Every page in turn; it is on the screen when its address is yielded."""
    page.goto("/admin/")
    links = page.get_by_role("navigation", name="Console").get_by_role("link")
    for path in dict.fromkeys(urlsplit(link).path for link in links.evaluate_all("all => all.map(a => a.href)")):
        page.goto(path)
        yield path
        if detail := first_row(page):
            page.goto(detail)
            yield detail
    for path in OTHERS:
        page.goto(path)
        yield path


def barriers(page: Page, *rules: str) -> list[str]:
    """What axe-core calls serious or critical, less what is FOREIGN; all of its rules, or only some."""
    options = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
    found: list[dict[str, Any]] = Axe().run(page, options=options).response["violations"]
    return [
        f"{one['id']}: {node['html'][:200]} {node['failureSummary']}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
        if FOREIGN.get(one["id"], "\0") not in node["html"]
    ]


def picture(page: Page, path: Path) -> None:
    """Of the page as it is once its socket stands."""
    if (badge := page.locator("p.live")).count():
        expect(badge).to_have_text("●live")
    page.screenshot(path=path)


@pytest.mark.parametrize("name", MAIN)
def test_main_pages_have_no_serious_barrier(name: str, desk: Desk, screens: Path) -> None:
    desk.product.rows("UPDATE agents_lease SET seen_at = now() WHERE seen_at > now() - interval '30 min' RETURNING 1")
    page = desk.stranger() if name == "login" else desk.operator()
    open_page(page, MAIN[name])
    picture(page, screens / f"{name}-light.png")
    found = barriers(page) if name in HEARD else []
    page.emulate_media(color_scheme="dark")
    page.reload()
    picture(page, screens / f"{name}-dark.png")
    assert found + (barriers(page, "color-contrast", "link-in-text-block") if name in DARK else []) == []


def test_no_page_breaks_its_policy_or_has_an_error(desk: Desk) -> None:
    page = desk.operator()
    seen = list(everything(page))
    page.wait_for_load_state("networkidle")
    assert len(seen) > 30
