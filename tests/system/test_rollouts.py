"""Test that changes of drivers take effect through the whole product while its processes are killed (promise L2)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import requests

from tests.system.product import Product, running
from tests.system.test_kill import VICTIMS

pytestmark = pytest.mark.system
SETTINGS = {"CYBORG_HOST_NAME": "here.example", "CYBORG_HOST_NODE": "here", "CYBORG_ENABLED_DRIVERS": "fake_driver"}
SETTINGS |= {"CYBORG_BEAT_S": "1", "CYBORG_RESCAN_S": "5"}
SOON_S = 60.0
COUNT_DEVICES = "SELECT count(*) FROM accelerators_device WHERE state <> 'missing'"
LAST_HEARD = "SELECT seen_at FROM agents_lease"
DRIVER_STATE = "SELECT state, drifts FROM accelerators_hostdriver WHERE driver = 'fake_driver'"


def test_L2_driver_changes_take_effect_and_last_while_processes_are_killed(folder: Path) -> None:
    with running(Product(folder / "state", SETTINGS)) as product:
        token = product.manage("api_token", "olga")[-1]
        product.until(lambda: product.rows(DRIVER_STATE) == [("ok", False)], SOON_S, "the driver answers")
        for count, victim in enumerate(("agent", "work's group", "web"), start=2):
            change_driver_while_killing(product, token, folder, count, victim)
        last_line = product.manage("driver", "update", "fake_driver", "--all", "--disable", "--wait")[-1]
        assert last_line.split()[:2] == ["here.example", "done"]
        assert product.rows(COUNT_DEVICES) == [(0,)]
        assert product.rows(DRIVER_STATE) == [("disabled", False)]
        (heard_before,) = product.rows(LAST_HEARD)
        product.remember_processes()
        product.kill()
        product.wait_until_nothing_is_left()
        product.start()
        (row,) = product.until(lambda: read_driver_row(product, token), SOON_S, "it answers again")
        assert (row["seen"]["state"], row["drifts"]) == ("disabled", False)
        # The lease of the time before the kill would still count as up for a moment.
        product.until(lambda: product.rows(LAST_HEARD)[0] > heard_before, SOON_S, "the agent was heard again")
        product.until(lambda: is_agent_up(product, token), 2 * SOON_S, "the agent is up")
        product.manage("driver", "update", "fake_driver", "--host", "here.example", "--enable", "--wait")
        assert product.rows(COUNT_DEVICES) == [(4,)], "with the settings it had"
        (folder / "six.json").write_text('{"count": 6}')
        (folder / "fake.toml").write_text(f'control_file = "{folder}/six.json"\n')
        file = str(folder / "fake.toml")
        product.manage("driver", "update", "fake_driver", "--all", "--settings-file", file, "--wait")
        assert product.rows(COUNT_DEVICES) == [(6,)]


def change_driver_while_killing(product: Product, token: str, folder: Path, count: int, victim: str) -> None:
    """Change the driver's settings to `count` cards, kill `victim` at once, and retry until the change is done."""
    script = folder / f"{count}.json"
    script.write_text(json.dumps({"count": count}))
    body: dict[str, object] = {"op": "update", "driver": "fake_driver", "hosts": ["here.example"]}
    body["settings"] = {"control_file": str(script)}

    def ended() -> str:
        shown = product.json(address.removeprefix(f"http://127.0.0.1:{product.port}"), token)
        return str(shown["steps"][0]["state"]) if shown.get("ended_at") else ""

    def order() -> list[requests.Response]:
        """Order the change, and return the answer; [] if it is refused because the agent is down."""
        (present,) = read_driver_row(product, token)
        answer = requests.post(
            f"http://127.0.0.1:{product.port}/api/rollouts/",
            json=body | {"generation": present["generation"]},
            headers={"X-Auth-Token": token},
            timeout=60,
        )
        return [] if answer.status_code == 409 and "is down" in answer.text else [answer]

    for attempt in range(5):
        product.until(lambda: product.get("/healthz")[0] == 200, SOON_S, "the web is there")
        (answer,) = product.until(order, SOON_S, "the agent is not down, so that a change of one host is not refused")
        assert answer.status_code == 202, answer.text
        address = answer.json()["url"]
        if attempt == 0:
            for one in product.until(lambda: VICTIMS[victim][0](product), SOON_S, f"{victim} is there"):
                os.kill(one.pid, signal.SIGKILL)
        if product.until(ended, 2 * SOON_S, "the rollout ends") in ("done", "skipped"):
            break
    assert product.rows(COUNT_DEVICES) == [(count,)], victim
    assert product.rows(DRIVER_STATE) == [("ok", False)]


def is_agent_up(product: Product, token: str) -> bool:
    """Return whether the agent is up: while it is down, a change of a driver on its host alone is refused."""
    return [one["state"] for one in product.json("/api/agents/", token).get("results", ())] == ["up"]


def read_driver_row(product: Product, token: str) -> list[dict[str, object]]:
    """Return the entries of the fake driver in the API; [] while there is no answer."""
    return list(product.json("/api/drivers/?driver=fake_driver", token).get("results", ()))
