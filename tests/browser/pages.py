"""The console's main pages; helpers that open a page, take a screenshot and check it with axe-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

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
"""The path of each page; an arrow means the page that the first row of this list links to."""
LEVELS = {"wcag2a", "wcag2aa", "wcag21a", "wcag21aa"}
"""Tags of the rules of WCAG 2.1, levels A and AA."""
COLOUR_RULES = ("color-contrast", "link-in-text-block")
"""The rules whose result may differ between light and dark."""
HIDE_LIKE_ROWS = """() => { const seen = new Set();
    for (const [at, row] of document.querySelectorAll("tbody tr").entries()) {
        const drawn = [row, ...row.querySelectorAll("*")].map(one => [one.tagName, one.getAttribute("class"),
            one.getAttribute("style"), one.disabled].join());
        const kind = [at % 2, ...drawn].join(" ");
        if (seen.has(kind)) { row.dataset.alike = ""; row.style.display = "none"; }
        seen.add(kind); } }"""
SHOW_ROWS = """() => { for (const row of document.querySelectorAll("[data-alike]")) {
    delete row.dataset.alike; row.style.display = ""; } }"""
FIND_UNEXPLAINED = """() => [...document.querySelectorAll(":disabled, [aria-disabled=true]")]
    .filter(one => one.getClientRects().length)
    .filter(one => !document.getElementById(one.getAttribute("aria-describedby") ?? "")?.textContent.trim())
    .map(one => `disabled without a reason: ${one.outerHTML.slice(0, 200)}`)"""
AXE_SCRIPT = Axe().axe_script
RUN_AXE = "options => axe.run(options).then(results => results.violations)"
FOREIGN = {"aria-prohibited-attr": "help-tooltip"}
"""Violations in markup of Django that are ignored: rule → text in the element. SelectFilter2.js writes these icons
beside the lists of groups and permissions; the same help is also shown as text."""


def first_row(page: Page) -> str | None:
    """Return the path that the first row of the open list links to, or None."""
    link = page.locator("#result_list tbody a[href*='/change/']").first
    return urlsplit(link.evaluate("a => a.href")).path if link.count() else None


def open_page(page: Page, where: str) -> None:
    """Open a page, given as one of the values of MAIN."""
    path, _, first = where.partition(" ")
    page.goto(path)
    if first:
        row = first_row(page)
        assert row, f"{path} shows no row that could be opened"
        page.goto(row)


def find_violations(page: Page) -> list[str]:
    """Return the violations that axe-core finds: all of levels A and AA, and of other rules the serious and critical
    ones. Those in FOREIGN are left out."""
    colours = {rule: {"enabled": False} for rule in COLOUR_RULES}
    return _run_axe(page, {"rules": colours}) + find_colour_violations(page)


def find_colour_violations(page: Page) -> list[str]:
    """Return the violations of the colour rules only. These are by far the slowest rules, so of table rows that differ
    only in their text, and therefore have the same colours, only one is checked."""
    page.evaluate(HIDE_LIKE_ROWS)
    try:
        return _run_axe(page, {"runOnly": list(COLOUR_RULES)})
    finally:
        page.evaluate(SHOW_ROWS)


def find_unexplained_controls(page: Page) -> list[str]:
    """Return the visible disabled buttons and fields that have no description which says why they are disabled."""
    found: list[str] = page.evaluate(FIND_UNEXPLAINED)
    return found


def _run_axe(page: Page, options: dict[str, Any]) -> list[str]:
    """Run axe-core in the page and return the violations. The script, which is large, is loaded once for each page, and
    nothing but the violations is sent back."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    found: list[dict[str, Any]] = page.evaluate(RUN_AXE, {"resultTypes": ["violations"]} | options)
    return [
        f"{one['id']}: {node['html'][:200]} {node['failureSummary']}"
        for one in found
        if LEVELS.intersection(one["tags"]) or one["impact"] in ("serious", "critical")
        for node in one["nodes"]
        if FOREIGN.get(one["id"], "\0") not in node["html"]
    ]


def picture(page: Page, path: Path) -> None:
    """Take a screenshot of the page, on a live page after its socket is connected."""
    if (badge := page.locator("p.live")).count():
        expect(badge).to_have_text("●live")
    page.screenshot(path=path)
