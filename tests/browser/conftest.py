"""A product, a browser, and people at its screen. Pages are watched: what their consoles complain of fails the test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import chromium
from tests.system.conftest import fresh
from tests.system.product import ROOT, Product, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

collect_ignore_glob = [] if find_spec("playwright") else ["test_*.py"]
Hardware = Callable[..., None]
SCREENS = ROOT / "var" / "screens"
WAIT_MS = 30_000
"""A deadline for what takes a moment: machines of the build are slow at times."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium. Playwright's driver ends it when we are gone, however we went."""
    from playwright.sync_api import expect, sync_playwright

    path = chromium.find()
    assert path, chromium.MISSING
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, chromium_sandbox=os.geteuid() != 0)
        yield started
        started.close()


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    """With a fake driver and no admission rule: what is found is inactive."""
    with fresh() as folder, running(Product(folder / "state", {"CYBORG_ENABLED_DRIVERS": "fake_driver"})) as started:
        yield started


@dataclass
class Desk:
    """Where people sit down before this product's console. `complaints` is what browsers' consoles said."""

    product: Product
    browser: Browser
    complaints: list[str] = field(default_factory=list)
    _cookies: list[Any] = field(default_factory=list)
    _contexts: list[BrowserContext] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Of the product's web process."""
        return f"http://127.0.0.1:{self.product.port}"

    def stranger(self, **how: Any) -> Page:
        """A new browser window of somebody who is not logged in; `how` is Playwright's (color_scheme, …)."""
        context = self.browser.new_context(
            base_url=self.address, viewport={"width": 1440, "height": 900}, reduced_motion="reduce", **how
        )
        context.set_default_timeout(WAIT_MS)
        context.on("console", lambda said: said.type in ("error", "warning") and self._note(said.page, said.text))
        context.on("weberror", lambda error: self._note(error.page, str(error.error)))
        self._contexts.append(context)
        return context.new_page()

    def operator(self, **how: Any) -> Page:
        """The same, of the administrator; logs in once per module."""
        page = self.stranger(**how)
        if self._cookies:
            page.context.add_cookies(self._cookies)
        else:
            log_in(page, self.product)
            self._cookies += page.context.cookies()
        return page

    def _note(self, page: Page | None, text: str) -> None:
        self.complaints.append(f"{page.url.removeprefix(self.address) if page else ''}: {text}")

    def forgive(self, pattern: str) -> None:
        """Complaints that the test itself has caused."""
        self.complaints[:] = [one for one in self.complaints if not re.search(pattern, one)]

    def leave(self, failed: str) -> None:
        """Close every window; a picture of each stays in var/screens when the test failed."""
        for number, page in enumerate(page for context in self._contexts for page in context.pages):
            if failed:
                with suppress(Exception):
                    page.screenshot(path=SCREENS / f"failed-{failed}-{number}.png", timeout=5000)
        for context in self._contexts:
            context.close()
        self._contexts.clear()


def log_in(page: Page, product: Product) -> None:
    """As a person does: the first page asks for it."""
    name, password = (product.state / "first-login").read_text().strip().split(" / ")
    page.goto("/admin/")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/admin/")


@pytest.fixture(scope="module")
def _seats(product: Product, browser: Browser) -> Desk:
    return Desk(product, browser)


@pytest.fixture
def desk(_seats: Desk, request: pytest.FixtureRequest) -> Iterator[Desk]:
    """This product's desk for one test, which fails if any page had a complaint."""
    _seats.complaints.clear()
    failed_before = request.session.testsfailed
    yield _seats
    _seats.leave(re.sub(r"\W+", "-", request.node.name) if request.session.testsfailed > failed_before else "")
    assert not _seats.complaints


@pytest.fixture
def hardware(product: Product) -> Hardware:
    """`hardware("unplug", "0")`: what a hand does to the fake devices, as `python -m drivers.fake` lets it."""
    control = str(product.state / "fake-driver.json")

    def change(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "drivers.fake", "--control", control, *words], check=True, cwd=ROOT)

    return change


@pytest.fixture(scope="session")
def screens() -> Path:
    """Where pictures of the main pages are left."""
    SCREENS.mkdir(parents=True, exist_ok=True)
    return SCREENS
