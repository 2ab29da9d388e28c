"""An operator's day in the console, at 100 000 devices: the steps of docs/operators-day.md, each with what the operator
sees and the seconds that it may take. Screenshots of the steps are the pictures of that page of the manual."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import ConsoleDesk
from tests.browser.pages import LISTS
from tests.fleet import rollout_hosts
from tests.fleet.large_site import LIVE_HOSTS, LargeSite, running_large_site
from tests.system.conftest import fresh_folder

pytestmark = pytest.mark.browser

HOST, NEW_DEVICES = "new-01.hall3.example", 500
FAILING = (7, 300, 512, 640, 999)
PAGE_S, JOIN_S, JOB_S, ROLLOUT_S = 10.0, 60.0, 60.0, 180.0
"""Seconds until a page shows its content, a host has joined, a bulk action has ended, and a rollout has ended."""
VIEWER, VIEWER_PASSWORD = "vera", "handed-over-at-ten"
DEVICES = f"{LISTS}device/"
Shot = Callable[[Page, str], None]


@pytest.fixture(scope="module")
def site() -> Iterator[LargeSite]:
    with fresh_folder() as folder, running_large_site(folder) as one:
        yield one


@pytest.fixture(scope="module")
def _desk_of_module(browser: Browser, site: LargeSite) -> Iterator[ConsoleDesk]:
    desk = ConsoleDesk(site.product, browser)
    yield desk
    desk.close()


@pytest.fixture
def shot(screens: Path) -> Shot:
    def take(page: Page, name: str) -> None:
        if (badge := page.locator("p.live")).count():
            expect(badge).to_have_text("●live")
        page.screenshot(path=screens / f"day-{name}.png")

    return take


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Fail if the block takes longer than `seconds`."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    print(f"{what}: {took:.1f} s of at most {seconds:.0f} s")
    assert took < seconds, f"{what} took {took:.1f} s"


def open_by_link(page: Page, name: str) -> None:
    """Open a page by its entry in the sidebar of the overview."""
    page.goto("/admin/")
    with within(PAGE_S, name):
        page.get_by_role("navigation", name="Console").get_by_role("link", name=name).click()
        page.wait_for_url(f"**/{name.lower().removesuffix('s').replace(' ', '')}/")


def test_an_operators_day_in_the_console(desk: ConsoleDesk, site: LargeSite, shot: Shot) -> None:
    provider = site.create_compute_provider(HOST)
    page = desk.open_as_administrator()
    page.goto("/admin/")
    shot(page, "overview")
    pasted = make_join_token(page, site, shot)
    with site.running_new_agent(pasted, NEW_DEVICES):
        see_the_host_join(page, pasted, shot)
        admit_its_devices(page, site, shot)
        make_a_profile(page, shot)
        attach_a_device(page, site, provider, shot)
        drain_the_host(page, shot)
    roll_out_a_driver(page, site, shot)
    find_a_serial_number(page, site, shot)
    export(page, site, shot)
    share_a_view_and_add_a_viewer(page, shot)
    act_as_the_viewer(desk.open_as(VIEWER, VIEWER_PASSWORD), shot)


def make_join_token(page: Page, site: LargeSite, shot: Shot) -> str:
    """The token is shown once, in the command to paste; return the command."""
    open_by_link(page, "Join tokens")
    page.get_by_role("link", name=re.compile("add", re.IGNORECASE)).first.click()
    page.get_by_label("Host", exact=True).fill(HOST)
    page.get_by_label("Address of the conductor").fill(site.address)
    with within(PAGE_S, "the token"):
        page.get_by_role("button", name="Make the token").click()
        expect(page.get_by_role("heading", name="The token is shown only now")).to_be_visible()
    shot(page, "token")
    pasted = page.locator("pre.log").inner_text().strip()
    assert pasted.endswith(" cyborg-agent")
    return pasted


def see_the_host_join(page: Page, pasted: str, shot: Shot) -> None:
    """The host appears in the list of hosts with its devices; the list of tokens shows no token."""
    page.goto(f"{LISTS}host/?q={HOST}")
    with within(JOIN_S, "the host joins"):
        while not page.get_by_role("link", name=HOST).count():
            page.wait_for_timeout(500)
            page.reload()
        row = page.locator("#result_list tbody tr").filter(has_text=HOST)
        expect(row).to_contain_text(str(NEW_DEVICES), timeout=1000 * JOIN_S)
        expect(row).to_contain_text("live")
        expect(row).to_contain_text("●up", timeout=1000 * JOIN_S)
    shot(page, "host")
    open_by_link(page, "Join tokens")
    expect(page.locator("#result_list")).to_contain_text(HOST)
    assert pasted.split(maxsplit=1)[0].partition("=")[2] not in page.content()


def admit_its_devices(page: Page, site: LargeSite, shot: Shot) -> None:
    """A rule for the new hall makes the 500 devices ready, and no device of another host."""
    page.goto(f"{LISTS}admissionrule/add/")
    page.get_by_label("Name").fill("hall3")
    page.get_by_label("Host").fill("new-*.hall3.example")
    page.get_by_label("Driver").fill("fake_driver")
    page.get_by_label("Action").select_option("ready")
    shot(page, "rule")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("button", name="Save the rule").click()
    page.get_by_role("button", name="Apply them to devices that are inactive now").click()
    expect(page.get_by_text("becomes ready by rule hall3").first).to_be_visible()
    shot(page, "apply")
    with within(JOB_S, "the rule"):
        page.get_by_role("button", name=f"Apply the admission rules {NEW_DEVICES} of {NEW_DEVICES}").click()
        expect(page.get_by_text(f"{NEW_DEVICES} done").first).to_be_visible(timeout=1000 * JOB_S)
    with within(PAGE_S, "the admitted devices"):
        page.goto(f"{DEVICES}?host__name={HOST}&state=ready")
        expect(page.get_by_text(f"{NEW_DEVICES} devices", exact=True)).to_be_visible()


def make_a_profile(page: Page, shot: Shot) -> None:
    """The form offers the resource class, and says before it creates the profile that the new host fits."""
    page.goto(f"{LISTS}deviceprofile/add/")
    page.get_by_label("Name").fill("fpga-small")
    page.get_by_label("Description").fill("One FPGA of hall 3")
    assert page.locator("#resource-classes option[value=FPGA]").count() == 1
    page.get_by_label("Resource class").fill("FPGA")
    page.get_by_label("Other traits and hints").fill("trait:CUSTOM_FAKE_DEVICE=required")
    with within(PAGE_S, "the hosts that fit"):
        page.get_by_role("button", name="Show which hosts fit now").click()
        expect(page.get_by_role("link", name=HOST)).to_be_visible()
    page.get_by_role("link", name=HOST).scroll_into_view_if_needed()
    shot(page, "profile")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("fpga-small")
    expect(page.locator("main")).to_contain_text("accel:device_profile")


def attach_a_device(page: Page, site: LargeSite, provider: str, shot: Shot) -> None:
    """A running instance on the new host gets a unit; its page says what is left to do by hand."""
    instance = site.boot_instance(HOST, provider)
    site.product.until(lambda: site.knows_all_providers(HOST), JOB_S, "Placement knows the devices")
    page.goto(f"{LISTS}attachment/attach/")
    page.get_by_label("Instance").fill(instance)
    page.get_by_label("Device profile").fill("fpga-small")
    page.get_by_label("Reason").fill("more throughput")
    with within(JOB_S, "the attachment"):
        page.get_by_role("button", name="Attach").click()
        expect(page.get_by_role("region", name="Now")).to_contain_text("attached", timeout=1000 * JOB_S)
    assert site.read_claims(instance) == [{"FPGA": 1}]
    shot(page, "attach")


def drain_the_host(page: Page, shot: Shot) -> None:
    """The preview counts 500 devices and names the held one; after the drain only this one waits for its instance."""
    page.goto(f"{DEVICES}?host__name={HOST}")
    page.get_by_label("Select all objects on this page for an action").check()
    page.get_by_text(f"Select all {NEW_DEVICES} devices").click()
    page.locator("select[name=action]").select_option(label="Drain")
    with within(PAGE_S, "the preview of the drain"):
        page.get_by_role("button", name="Run").click()
        expect(page.locator("main")).to_contain_text(f"The {NEW_DEVICES} chosen devices are on 1 host.")
    expect(page.get_by_role("region", name="Held")).to_be_visible()
    page.get_by_label("Reason").fill("new firmware")
    page.get_by_label("the number of devices").fill(str(NEW_DEVICES))
    shot(page, "drain")
    with within(JOB_S, "the drain"):
        page.get_by_role("button", name=re.compile(f"{NEW_DEVICES} of {NEW_DEVICES}")).click()
        now = page.get_by_role("region", name="Now")
        expect(now).to_contain_text(f"{NEW_DEVICES} ", timeout=1000 * JOB_S)
        expect(now).to_contain_text("took", timeout=1000 * JOB_S)
    shot(page, "drained")
    page.goto(f"{DEVICES}?host__name={HOST}&draining=yes")
    expect(page.locator("#result_list tbody tr")).to_have_count(1)
    expect(page.locator("#result_list tbody tr")).to_contain_text("draining")


def roll_out_a_driver(page: Page, site: LargeSite, shot: Shot) -> None:
    """Five of 1000 hosts fail and are named first; a retry of these five succeeds."""
    names = site.break_hosts(*FAILING)
    page.goto(f"{LISTS}hostdriver/?q=pci_driver")
    page.get_by_role("link", name="pci_driver").first.click()
    page.get_by_label("Hosts", exact=True).select_option(label="hosts whose names match")
    page.get_by_label("Names of these hosts").fill("cmp*.hall2.example")
    page.get_by_label("Hosts at a time").fill("100")
    page.get_by_label("continue with other hosts after a host has failed").check()
    page.get_by_label("Reason").first.fill("new cards in hall 2")
    shot(page, "driver")
    with within(PAGE_S, "the preview of the rollout"):
        page.get_by_role("button", name="Install").click()
        expect(page.get_by_role("heading", name="What this rollout would do now")).to_be_visible()
    expect(page.locator("main")).to_contain_text(re.compile(rf"{LIVE_HOSTS}\W+will be done"))
    page.get_by_label("the number of hosts").fill(str(LIVE_HOSTS))
    shot(page, "rollout-preview")
    with within(ROLLOUT_S, "the rollout"):
        page.get_by_role("button", name=f"Install on {LIVE_HOSTS} of {LIVE_HOSTS}").click()
        now = page.get_by_role("region", name="Now")
        expect(now).to_contain_text(f"{LIVE_HOSTS - len(FAILING)} done", timeout=1000 * ROLLOUT_S)
        expect(now).to_contain_text("took", timeout=1000 * ROLLOUT_S)
    expect(now).to_contain_text(f"{len(FAILING)} failed")
    for place, name in enumerate(names):
        expect(now.locator("tbody tr").nth(place)).to_contain_text(name)
        expect(now.locator("tbody tr").nth(place)).to_contain_text(rollout_hosts.FAILURE_TEXT)
    shot(page, "rollout")
    site.repair_hosts()
    page.reload()
    page.get_by_role("button", name=f"Retry on the {len(FAILING)} hosts").click()
    page.get_by_label("the number of hosts").fill(str(len(FAILING)))
    with within(JOB_S, "the retry"):
        page.get_by_role("button", name=f"Install on {len(FAILING)} of {len(FAILING)}").click()
        expect(page.get_by_role("region", name="Now")).to_contain_text(f"{len(FAILING)} done", timeout=1000 * JOB_S)
    shot(page, "retry")


def find_a_serial_number(page: Page, site: LargeSite, shot: Shot) -> None:
    """The search of the header finds one of 100 000 devices by its serial number."""
    ((key, host),) = site.product.rows(
        "SELECT d.key, h.name FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id"
        " WHERE d.key LIKE 'serial:%%' ORDER BY d.id DESC LIMIT 1"
    )
    page.goto("/admin/")
    page.keyboard.press("/")
    page.keyboard.type(key.removeprefix("serial:"))
    with within(PAGE_S, "the serial number"):
        page.keyboard.press("Enter")
        expect(page.get_by_role("region", name="Identity")).to_contain_text(key)
    expect(page.get_by_role("region", name="Identity")).to_contain_text(host)
    shot(page, "serial")


def export(page: Page, site: LargeSite, shot: Shot) -> None:
    """All GPUs are downloaded as CSV, a row for each."""
    ((expected,),) = site.product.rows("SELECT count(*) FROM accelerators_device WHERE type = 'GPU'")
    assert expected > 25_000
    page.goto(f"{DEVICES}?type=GPU")
    page.get_by_text("Export", exact=True).click()
    shot(page, "export")
    with within(JOB_S, "the export"):
        with page.expect_download(timeout=1000 * JOB_S) as downloading:
            page.get_by_role("link", name="CSV").click()
        with downloading.value.path().open() as file:
            assert sum(1 for _ in csv.DictReader(file)) == expected


def share_a_view_and_add_a_viewer(page: Page, shot: Shot) -> None:
    """The operator shares a view of the failed GPUs, and gives a new user the role of a viewer."""
    page.goto(f"{DEVICES}?type=GPU&status=failed")
    page.get_by_text("Save this view").click()
    page.get_by_label("Name", exact=True).fill("Failed GPUs")
    page.get_by_label("share it with everybody").check()
    shot(page, "share")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("This view is saved as “Failed GPUs”, for everybody")).to_be_visible()
    page.goto("/admin/auth/user/add/")
    page.get_by_label("Username").fill(VIEWER)
    page.locator("#id_password1").fill(VIEWER_PASSWORD)
    page.locator("#id_password2").fill(VIEWER_PASSWORD)
    page.get_by_role("button", name="Save and continue editing").click()
    page.get_by_label("Staff status").check()
    page.locator("#id_groups_from").select_option(label="role:viewer")
    page.locator("#id_groups_add").click()
    shot(page, "viewer")
    page.get_by_role("button", name="Save", exact=True).click()


def act_as_the_viewer(page: Page, shot: Shot) -> None:
    """The viewer opens the shared view and sees the failed GPUs, but no action; the page says which role has them."""
    page.goto(DEVICES)
    with within(PAGE_S, "the shared view"):
        page.get_by_role("link", name="Failed GPUs").click()
        expect(page.locator("#result_list tbody tr").first).to_contain_text("failed")
    expect(page.locator("select[name=action]")).to_have_count(0)
    page.get_by_text("Why can’t I do more here?").click()
    expect(page.locator("details.refused")).to_contain_text("role:administrator")
    shot(page, "viewer-list")
    page.locator("#result_list tbody a[href*='/change/']").first.click()
    expect(page.get_by_role("button", name="Enable")).to_have_count(0)
