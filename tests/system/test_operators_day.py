"""An operator's day in a shell, at 100 000 devices: the steps of docs/operators-day.md as `cyborg`, `curl` and
`manage.py` processes, each with what it prints and the seconds that it may take."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import rollout_hosts
from tests.fleet.large_site import LIVE_HOSTS, LargeSite, running_large_site
from tests.support.environment import without_settings
from tests.system.product import ROOT

pytestmark = pytest.mark.system

HOST, NEW_DEVICES = "new-01.hall3.example", 500
FAILING = (7, 300, 512, 640, 999)
SOON_S, JOIN_S, ROLLOUT_S = 30.0, 60.0, 180.0


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of a JSON list."""
        return list(json.loads(self.out))


@dataclass
class Shell:
    """A shell of one person, whose token is in a file. `took` has the seconds of each step."""

    site: LargeSite
    name: str
    role: str = "admin"
    took: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token = self.site.product.manage("api_token", self.name, "--role", self.role)[-1]
        file = self.site.folder / f"token-{self.name}"
        file.write_text(self.token)
        file.chmod(0o600)
        self.environment = without_settings(CYBORG_URL=self.site.address, CYBORG_TOKEN_FILE=str(file))

    def run(self, *words: str, within: float = SOON_S) -> Outcome:
        """Run `cyborg` with these words; fail if it takes longer than `within` seconds."""
        return self._run(str(Path(sys.executable).with_name("cyborg")), *words, within=within)

    def post(self, path: str, body: Any) -> Outcome:
        """POST with curl; exit code 22 means that the service refused it."""
        words = ["curl", "-sS", "--fail-with-body", "-H", f"X-Auth-Token: {self.token}"]
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(body), f"{self.site.address}{path}"]
        return self._run(*words, within=SOON_S)

    def _run(self, *words: str, within: float) -> Outcome:
        began = time.monotonic()
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, cwd=ROOT, env=self.environment, timeout=4 * within
        )
        took = time.monotonic() - began
        self.took[" ".join(Path(word).name for word in words[:2])] = round(took, 1)
        assert took < within, f"{words[:3]} took {took:.1f} s: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def site(folder: Path) -> Iterator[LargeSite]:
    with running_large_site(folder) as one:
        yield one


def count_devices(site: LargeSite, condition: str, *values: object) -> int:
    """Return how many devices fulfil the SQL condition; `h` is the host."""
    query = "SELECT count(*) FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id WHERE "
    ((count,),) = site.product.rows(query + condition, *values)
    return int(count)


def test_an_operators_day_in_a_shell(site: LargeSite) -> None:
    olga = Shell(site, "olga")
    provider = site.create_compute_provider(HOST)
    made = olga.run("join-token", HOST, "--address", site.address, "--format", "json")
    assert made.code == 0, made.err
    token = json.loads(made.out)["token"]
    with site.running_new_agent(f"CYBORG_JOIN_TOKEN={token} cyborg-agent", NEW_DEVICES):
        see_the_host_join(olga, token)
        admit_its_devices(olga)
        instance = attach_a_device(olga, provider)
        drain_the_host(olga, instance)
    roll_out_a_driver(olga)
    find_a_serial_number(olga)
    export(olga)
    hand_over(olga)
    print(olga.took)


def see_the_host_join(olga: Shell, token: str) -> None:
    """The host is up and its devices are inactive; its token is listed as used, and is not shown again."""
    product = olga.site.product

    def is_up() -> bool:
        agents = olga.run("agent-list", "--state", "up", "-f", "json").rows()
        return HOST in [agent["host"]["name"] for agent in agents]

    product.until(is_up, JOIN_S, "the agent of the new host is up")
    arrived = "h.name = %s AND d.state = 'inactive'"
    product.until(lambda: count_devices(olga.site, arrived, HOST) == NEW_DEVICES, JOIN_S, "the devices arrive")
    listed = olga.run("join-token-list", "--host", HOST, "-f", "json")
    assert listed.rows()[0]["used_at"]
    assert token not in listed.out


def admit_its_devices(olga: Shell) -> None:
    """A rule makes the 500 devices ready; no other inactive device changes."""
    others = count_devices(olga.site, "h.name <> %s AND d.state = 'inactive'", HOST)
    assert others > 10_000
    rule = ("rule-create", "hall3", "--host", "new-*.hall3.example", "--driver", "fake_driver", "--action", "ready")
    shown = olga.run(*rule, "--dry-run", "-f", "json").rows()
    assert [(one["number"], one["text"]) for one in shown] == [(NEW_DEVICES, "becomes ready")]
    assert olga.run(*rule, "--yes").code == 0
    admitted = olga.run("device-admit", "--filter", f"host={HOST}", "-f", "json")
    assert admitted.code == 0, admitted.err
    assert len(admitted.rows()) == NEW_DEVICES
    ready = olga.run("device-list", "--host", HOST, "--state", "ready", "--quiet")
    assert len(ready.out.split()) == NEW_DEVICES
    assert count_devices(olga.site, "h.name <> %s AND d.state = 'inactive'", HOST) == others


def attach_a_device(olga: Shell, provider: str) -> str:
    """A running instance on the new host gets a unit that a new device profile asks for."""
    profile = {"name": "fpga-small", "groups": [{"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required"}]}
    made = olga.post("/api/profiles/", profile)
    assert made.code == 0, made.out
    instance = olga.site.boot_instance(HOST, provider)
    olga.site.product.until(lambda: olga.site.knows_all_providers(HOST), JOIN_S, "Placement is told")
    attached = olga.run("attach-instance", instance, "--profile", "fpga-small", "-f", "json")
    assert attached.code == 0, attached.err
    assert json.loads(attached.out)["state"] == "attached"
    (held,) = olga.run("accelerator-list", "--host", HOST, "-c", "instance", "-f", "json").rows()
    assert held == {"instance": instance}
    assert olga.site.read_claims(instance) == [{"FPGA": 1}]
    return instance


def drain_the_host(olga: Shell, instance: str) -> None:
    """A preview counts the held device; the drain of this device lasts until its instance has released it."""
    words = ("device-drain", "--filter", f"host={HOST}", "--reason", "new firmware")
    preview = olga.run(*words, "--dry-run")
    assert f"drain to {NEW_DEVICES} devices on 1 host; 1 held device would be changed" in preview.out + preview.err
    done = olga.run(*words, "--yes", "-f", "json", within=60)
    assert done.code == 0, done.err
    assert len(done.rows()) == NEW_DEVICES
    draining = olga.run("device-list", "--host", HOST, "--draining", "-f", "json").rows()
    assert [row["held"] for row in draining] == [1]
    detached = olga.run("detach-instance", instance, "--yes")
    assert detached.code == 0, detached.err
    idle = "h.name = %s AND d.state = 'maintenance' AND d.drain_to IS NULL"
    olga.site.product.until(lambda: count_devices(olga.site, idle, HOST) == NEW_DEVICES, SOON_S, "the drain ends")


def roll_out_a_driver(olga: Shell) -> None:
    """Five of 1000 hosts fail, are named while the rollout runs, and are done after a retry."""
    names = olga.site.break_hosts(*FAILING)
    hosts = ("--hosts-like", "cmp*.hall2.example", "--max-parallel", "100", "--keep-going")
    preview = olga.run("install-driver", "pci_driver", *hosts, "--dry-run")
    assert f"{LIVE_HOSTS} will be done" in " ".join(preview.out.split())
    began = olga.run("install-driver", "pci_driver", *hosts, "--yes", "-f", "json", within=ROLLOUT_S)
    assert began.code == 6, began.err
    steps = began.rows()
    assert len(steps) == LIVE_HOSTS
    assert sorted(step["host"] for step in steps if step["state"] == "failed") == names
    assert {step["text"] for step in steps if step["state"] == "failed"} == {rollout_hosts.FAILURE_TEXT}
    assert sum(step["state"] == "done" for step in steps) == LIVE_HOSTS - len(FAILING)
    for name in names:
        assert f"{name} failed: {rollout_hosts.FAILURE_TEXT}" in began.err
    olga.site.repair_hosts()
    rollout = olga.run("rollout-show", "-f", "json").rows()[0]["uuid"]
    retried = olga.run("rollout-retry", rollout, "--reason", "disk freed", "--yes", "-f", "json")
    assert retried.code == 0, retried.err
    assert {step["host"]: step["state"] for step in retried.rows()} == dict.fromkeys(names, "done")
    rows = olga.run("driver-list", "--driver", "pci_driver", "--limit", "2000", "-f", "json").rows()
    installed = [row for row in rows if row["seen"]["state"] == "ok"]
    assert (len(installed), [row for row in installed if row["drifts"]]) == (LIVE_HOSTS, [])


def find_a_serial_number(olga: Shell) -> None:
    """One of 100 000 devices is found by its serial number."""
    ((key, host),) = olga.site.product.rows(
        "SELECT d.key, h.name FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id"
        " WHERE d.key LIKE 'serial:%%' ORDER BY d.id DESC LIMIT 1"
    )
    (found,) = olga.run("device-list", "--serial", key.removeprefix("serial:"), "-f", "json", within=10).rows()
    assert found["host"]["name"] == host


def export(olga: Shell) -> None:
    """All GPUs are exported as CSV, a row for each."""
    expected = count_devices(olga.site, "d.type = 'GPU' AND d.state <> 'retired'")
    assert expected > 25_000
    done = olga.run("device-list", "--type", "GPU", "--limit", "100000", "--format", "csv", within=120)
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert (done.code, len(rows), {row["type"] for row in rows}) == (0, expected, {"GPU"})


def hand_over(olga: Shell) -> None:
    """A viewer sees the same devices; each change is refused, and the message says which role would allow it."""
    vera = Shell(olga.site, "vera", role="auditor")
    words = ("device-list", "--health", "failed", "--limit", "1000", "--quiet")
    seen = vera.run(*words)
    assert seen.out == olga.run(*words).out != ""
    refused = vera.run("device-ready", seen.out.split()[0], "--yes")
    assert refused.code == 4
    assert "role admin" in refused.err, refused.err
    assert vera.run("install-driver", "pci_driver", "--all-hosts", "--yes").code == 4
    assert vera.run("join-token", "more.hall3.example", "--address", olga.site.address).code == 4
    assert vera.post("/api/rules/", {"name": "mine", "action": "ready"}).code == 22
