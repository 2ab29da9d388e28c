"""Units made through the whole product, whoever is killed meanwhile: in the end the rows are what the host has."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.system.conftest import fresh
from tests.system.machine import fake
from tests.system.product import Product, running
from tests.system.test_acts import SETTINGS, Site, again

pytestmark = pytest.mark.system


ONE = ("handles", 1)
"""What the card has until it is divided."""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with fresh() as folder, running(Product(folder / "state", SETTINGS)) as product:
        yield Site(product)


def on_the_host(site: Site) -> int:
    """So many parts the card has, as the hardware itself says."""
    return int(next((path.read_text() for path in site.hardware("parts")), "1"))


def listed(site: Site) -> int:
    """So many units a reader sees."""
    return len(site.product.json("/api/accelerators/?attached=false", site.admin)["results"])


def test_units_are_made_and_taken_away_at_a_shell_and_over_the_api(site: Site) -> None:
    again(site, ONE)
    site.until(lambda: listed(site) == 1, "one unit")
    answer = site.call("POST", "/api/accelerators/", {"targets": [{"device": site.device}], "count": 3, "reason": "x"})
    (made,) = answer.json()["results"]
    assert (answer.status_code, made["refused"]) == (202, "")
    done = site.call("GET", f"/api/commands/{made['command']}/?wait=30").json()
    assert (done["state"], listed(site), on_the_host(site)) == ("succeeded", 4, 4)
    (result,) = json.loads(
        site.product.manage("accelerator", "delete", site.device, "--count", "2", "--wait", "--json")[-1]
    )
    assert (result["command"]["state"], listed(site), on_the_host(site)) == ("succeeded", 2, 2)
    refused = site.call("PATCH", f"/api/devices/{site.device}/", {"layout": {"speed": "9"}})
    assert refused.status_code == 400 and "takes parts" in refused.text
    last = site.call("POST", "/api/accelerators/delete/", {"targets": [{"device": site.device}]}).json()["results"][0]
    ended = site.call("GET", f"/api/commands/{last['command']}/?wait=30").json()
    assert ended["state"] in ("failed", "refused") and "with 1 to" in ended["text"]
    assert (listed(site), on_the_host(site)) == (2, 2)


@pytest.mark.parametrize("victim", ["agent", "web", "work"])
def test_whoever_is_killed_amid_it_ends_and_the_rows_are_what_the_host_has(site: Site, victim: str) -> None:
    again(site, ONE, ("slow_s", {"partition": 1.5}))
    before = on_the_host(site)
    seen = site.call("GET", f"/api/devices/{site.device}/").json()["generation"]
    wanted = {"targets": [{"device": site.device}], "count": 1, "generation": seen}
    (made,) = site.call("POST", "/api/accelerators/", wanted).json()["results"]

    def command() -> dict[str, object]:
        return next(one for one in site.commands("partition") if one["uuid"] == made["command"])

    site.until(lambda: command()["state"] in ("taken", "started", "succeeded"), "it is under way")
    child = site.product.child(victim)
    assert child
    os.kill(child.pid, signal.SIGKILL)
    site.until(lambda: site.product.get("/healthz")[0] == 200, "the web is there")
    fake(site.product, "set", "slow_s", "{}")
    site.until(lambda: command()["ended_at"], "it has ended")
    assert listed(site) == on_the_host(site) == before + (command()["state"] == "succeeded")
    device = site.call("GET", f"/api/devices/{site.device}/").json()
    assert device["busy_with"] is None and device["generation"] > seen
    assert site.call("POST", "/api/accelerators/", wanted).status_code == 409
