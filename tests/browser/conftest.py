"""Fixtures: a product, a browser and its windows. An error or warning in a browser's console fails the test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import chromium
from tests.system.conftest import fresh_folder
from tests.system.product import ROOT, Product, environment, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

collect_ignore_glob = [] if find_spec("playwright") else ["test_*.py"]
Hardware = Callable[..., None]
SCREENS = ROOT / "var" / "screens"
WAIT_MS = 30_000
"""Timeout for actions that usually take a moment; build machines are sometimes slow."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start Chromium. Playwright's driver ends it when this process ends, even if it is killed."""
    from playwright.sync_api import expect, sync_playwright

    path = chromium.find()
    assert path, chromium.MISSING
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, chromium_sandbox=os.geteuid() != 0)
        yield started
        started.close()


def _installation_of(item: Any) -> str:
    """Return the INSTALLATION of the item's module, '' for modules of other lanes."""
    return getattr(getattr(item, "module", None), "INSTALLATION", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the modules that share an installation, because a start of the product takes seconds."""
    items.sort(key=_installation_of)


class Installations:
    """Runs one product at a time, with its desk; replaces it when a module needs another installation."""

    def __init__(self, browser: Browser) -> None:
        self._browser, self._name = browser, ""
        self._desk: ConsoleDesk | None = None
        self._running = ExitStack()

    def get(self, name: str) -> ConsoleDesk:
        """Return the desk of the installation `name`; start this installation if another one or none runs."""
        if self._desk is None or name != self._name:
            self.close()
            folder = self._running.enter_context(fresh_folder())
            settings = {"CYBORG_ENABLED_DRIVERS": "fake_driver"}
            product = self._running.enter_context(running(Product(folder / "state", settings)))
            if name.startswith("cloud"):
                fill_with_sample(product)
            self._name, self._desk = name, ConsoleDesk(product, self._browser)
        return self._desk

    def close(self) -> None:
        """Stop the running product and close its desk."""
        if self._desk:
            self._desk.close()
        self._desk = None
        self._running.close()


def fill_with_sample(product: Product) -> None:
    """Store the cloud and the users of `tests.browser.sample`."""
    known = environment(CYBORG_STATE_DIR=str(product.state))
    subprocess.run([sys.executable, "-m", "tests.browser.sample"], check=True, cwd=ROOT, env=known)


@pytest.fixture(scope="session")
def _installations(browser: Browser) -> Iterator[Installations]:
    installations = Installations(browser)
    yield installations
    installations.close()


@pytest.fixture(scope="module")
def _desk_of_module(_installations: Installations, request: pytest.FixtureRequest) -> ConsoleDesk:
    return _installations.get(_installation_of(request))


@pytest.fixture(scope="module")
def product(_desk_of_module: ConsoleDesk) -> Product:
    """Return the product of the module's INSTALLATION. It has a fake driver and no admission rule, so found devices are
    inactive; the installation `cloud` also has the sample."""
    return _desk_of_module.product


@dataclass
class ConsoleDesk:
    """Opens browser windows for the product's console; `complaints` are errors and warnings in browsers' consoles."""

    product: Product
    browser: Browser
    complaints: list[str] = field(default_factory=list)
    _cookies: dict[str, list[Any]] = field(default_factory=dict)
    _contexts: list[BrowserContext] = field(default_factory=list)
    _own: BrowserContext | None = None
    """The administrator's browser context, which keeps its HTTP cache from test to test."""

    @property
    def address(self) -> str:
        """Return the address of the product's web process."""
        return f"http://127.0.0.1:{self.product.port}"

    def renew_leases(self) -> None:
        """Make hosts live that were live when the product was filled. No agent runs on them, so the earlier tests may
        have lasted longer than a host may be silent."""
        self.product.rows(
            "WITH live AS (UPDATE agents_lease SET seen_at = now() WHERE seen_at > now() - interval '30 min'"
            " RETURNING host_id) UPDATE accelerators_host SET stale_since = NULL"
            " WHERE id IN (SELECT host_id FROM live) RETURNING 1"
        )

    def open_logged_out(self, **how: Any) -> Page:
        """Open a window without a login; `how` are options of Playwright's context (color_scheme, …)."""
        context = self._open(**how)
        self._contexts.append(context)
        return context.new_page()

    def open_as_administrator(self, **how: Any) -> Page:
        """Open a tab in the administrator's browser context, with `how` in a new one. The login happens only once."""
        if how:
            return self.open_as(*self._first_login(), **how)
        if self._own is None:
            self._own = self._open()
            self._log_in(self._own, *self._first_login())
        return self._own.new_page()

    def open_as(self, name: str, password: str, **how: Any) -> Page:
        """Open a window in a new browser context in which user `name` is logged in."""
        context = self._open(**how)
        self._contexts.append(context)
        self._log_in(context, name, password)
        return context.new_page()

    def _open(self, **how: Any) -> BrowserContext:
        context = self.browser.new_context(
            base_url=self.address, viewport={"width": 1440, "height": 900}, reduced_motion="reduce", **how
        )
        context.set_default_timeout(WAIT_MS)
        context.on(
            "console",
            lambda message: message.type in ("error", "warning") and self._add_complaint(message.page, message.text),
        )
        context.on("weberror", lambda error: self._add_complaint(error.page, str(error.error)))
        return context

    def _log_in(self, context: BrowserContext, name: str, password: str) -> None:
        if name not in self._cookies:
            page = context.new_page()
            log_in(page, name, password)
            self._cookies[name] = context.cookies()
            page.close()
        context.add_cookies(self._cookies[name])

    def _first_login(self) -> tuple[str, str]:
        return first_login(self.product)

    def _add_complaint(self, page: Page | None, text: str) -> None:
        self.complaints.append(f"{page.url.removeprefix(self.address) if page else ''}: {text}")

    def drop_complaints(self, pattern: str) -> None:
        """Remove expected complaints that match `pattern`."""
        self.complaints[:] = [one for one in self.complaints if not re.search(pattern, one)]

    def close_windows(self, failed: str) -> None:
        """Close every window. If the test `failed` (its name), save a screenshot of each to var/screens first."""
        open_ones = [page for context in [*self._contexts, self._own] if context for page in context.pages]
        for number, page in enumerate(open_ones):
            if failed:
                with suppress(Exception):
                    page.screenshot(path=SCREENS / f"failed-{failed}-{number}.png", timeout=5000)
        for page in self._own.pages if self._own else []:
            page.close()
        for context in self._contexts:
            context.close()
        self._contexts.clear()

    def close(self) -> None:
        """Close every window and the administrator's browser context."""
        self.close_windows("")
        if self._own:
            self._own.close()
        self._own = None


def first_login(product: Product) -> tuple[str, str]:
    """Return name and password of the administrator that the first start has created."""
    name, password = (product.state / "first-login").read_text().strip().split(" / ")
    return name, password


def log_in(page: Page, name: str, password: str) -> None:
    """Log in through the form of the first page."""
    page.goto("/admin/")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/admin/")


@pytest.fixture
def desk(_desk_of_module: ConsoleDesk, request: pytest.FixtureRequest) -> Iterator[ConsoleDesk]:
    """Yield the product's desk for one test; fail the test if a page logged an error or a warning."""
    _desk_of_module.complaints.clear()
    failed_before = request.session.testsfailed
    yield _desk_of_module
    _desk_of_module.close_windows(
        re.sub(r"\W+", "-", request.node.name) if request.session.testsfailed > failed_before else ""
    )
    assert not _desk_of_module.complaints


@pytest.fixture
def hardware(product: Product) -> Hardware:
    """Return a function that changes the fake devices with `python -m drivers.fake`: `hardware("unplug", "0")`."""
    control = str(product.state / "fake-driver.json")

    def change(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "drivers.fake", "--control", control, *words], check=True, cwd=ROOT)

    return change


@pytest.fixture(scope="session")
def screens() -> Path:
    """Create and return the folder for screenshots of the main pages."""
    SCREENS.mkdir(parents=True, exist_ok=True)
    return SCREENS
