"""Test that units are created and deleted through the whole product, and that the rows match the host after kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.environment import without_settings
from tests.system.conftest import fresh_folder
from tests.system.machine import run_fake_command
from tests.system.product import Product, running
from tests.system.test_device_commands import SETTINGS, ProductWithCard, reset_card

pytestmark = pytest.mark.system


ONE_HANDLE = ("handles", 1)
"""The setting of the fake card that gives it one handle until it is partitioned."""


@pytest.fixture(scope="module")
def site() -> Iterator[ProductWithCard]:
    with fresh_folder() as folder, running(Product(folder / "state", SETTINGS)) as product:
        yield ProductWithCard(product)


def count_parts_on_host(site: ProductWithCard) -> int:
    """Return the number of the card's parts according to the fake hardware."""
    return int(next((path.read_text() for path in site.list_hardware_files("parts")), "1"))


def count_listed_units(site: ProductWithCard) -> int:
    """Return the number of free units that the API lists."""
    return len(site.product.json("/api/accelerators/?attached=false", site.admin)["results"])


def test_units_can_be_created_over_the_api_and_deleted_by_command(site: ProductWithCard) -> None:
    reset_card(site, ONE_HANDLE)
    site.until(lambda: count_listed_units(site) == 1, "one unit")
    answer = site.call("POST", "/api/accelerators/", {"targets": [{"device": site.device}], "count": 3, "reason": "x"})
    (made,) = answer.json()["results"]
    assert (answer.status_code, made["refused"]) == (202, "")
    done = site.call("GET", f"/api/commands/{made['command']}/?wait=30").json()
    assert (done["state"], count_listed_units(site), count_parts_on_host(site)) == ("succeeded", 4, 4)
    lines = site.product.manage("accelerator", "delete", site.device, "--count", "2", "--wait", "--json")
    (result,) = json.loads("".join(lines))
    assert (result["state"], count_listed_units(site), count_parts_on_host(site)) == ("succeeded", 2, 2)
    generation = site.call("GET", f"/api/devices/{site.device}/").json()["generation"]
    refused = site.call("PATCH", f"/api/devices/{site.device}/", {"layout": {"speed": "9"}, "generation": generation})
    assert refused.status_code == 400 and "takes parts" in refused.text
    last = site.call("POST", "/api/accelerators/delete/", {"targets": [{"device": site.device}]}).json()["results"][0]
    ended = site.call("GET", f"/api/commands/{last['command']}/?wait=30").json()
    assert ended["state"] in ("failed", "refused") and "with 1 to" in ended["text"]
    assert (count_listed_units(site), count_parts_on_host(site)) == (2, 2)


def test_accelerator_create_makes_units_on_the_host_and_the_list_shows_them(site: ProductWithCard) -> None:
    reset_card(site, ONE_HANDLE)
    site.until(lambda: count_listed_units(site) == count_parts_on_host(site), "the list agrees with the host")
    before = count_parts_on_host(site)
    words = ("accelerator-create", "--filter", "host=here.example", "--count", "1")
    (row,) = run_cyborg(site, *words, "--dry-run")
    assert (row["number"], row["outcome"]) == (1, "will be done") and count_parts_on_host(site) == before
    (row,) = run_cyborg(site, *words)
    assert (row["device"], row["outcome"], row["state"]) == (site.device, "done", "succeeded")
    assert count_parts_on_host(site) == before + 1, "the driver has made the unit"
    listed = run_cyborg(site, "accelerator-list", "--all", "--device", site.device)
    assert [unit["state"] for unit in listed] == ["free"] * (before + 1)
    (row,) = run_cyborg(site, "accelerator-delete", site.device, "--count", "1")
    assert (row["outcome"], count_parts_on_host(site)) == ("done", before)
    assert len(run_cyborg(site, "accelerator-list", "--all", "--device", site.device)) == before


def run_cyborg(site: ProductWithCard, *words: str) -> list[dict[str, Any]]:
    """Run a verb of `cyborg` in a process of its own, as a person does, and return the rows that it prints."""
    address = {"CYBORG_URL": f"http://127.0.0.1:{site.product.port}", "CYBORG_TOKEN": site.admin}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("cyborg")), *words, "-f", "json"],
        env=without_settings(**address),
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("victim", ["agent", "web", "work"])
def test_creating_units_ends_consistently_when_a_process_is_killed_during_it(
    site: ProductWithCard, victim: str
) -> None:
    reset_card(site, ONE_HANDLE, ("slow_s", {"partition": 1.5}))
    before = count_parts_on_host(site)
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
    run_fake_command(site.product, "set", "slow_s", "{}")
    site.until(lambda: command()["ended_at"], "it has ended")
    assert count_listed_units(site) == count_parts_on_host(site) == before + (command()["state"] == "succeeded")
    device = site.call("GET", f"/api/devices/{site.device}/").json()
    assert device["busy_with"] is None and device["generation"] > seen
    assert site.call("POST", "/api/accelerators/", wanted).status_code == 409
