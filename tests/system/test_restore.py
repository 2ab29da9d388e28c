"""Test that a backup taken during writes restores everything that was acknowledged before it.

The hosts are then newer than the restored database; an instance keeps what was attached to it after the backup.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.load import Load
from tests.system.product import ROOT, Product, environment, running
from tests.system.test_device_commands import SETTINGS, ProductWithCard

pytestmark = pytest.mark.system
USERS = "SELECT username, password FROM auth_user ORDER BY username"
ROLES = {f"role:{name}" for name in ("administrator", "operator", "auditor", "viewer")}


KILLED_RESTORE = """
import os, runpy, signal, sys
from drivers import files

def write_private(path, content, write=files.write_private):
    if path.name == "secret-key" and (path.parent / "restore-unfinished").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, content)

files.write_private = write_private
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs `manage.py`, and kills it between `pg_restore` and the writing of the secret key."""


def kill_restore_before_the_secret_key(product: Product, backup: Path) -> None:
    """Restore the backup into the product's state directory in a process that is killed when the dump is loaded."""
    words = [sys.executable, "-c", KILLED_RESTORE, str(ROOT / "manage.py"), "restore", str(backup)]
    settings = environment(CYBORG_STATE_DIR=str(product.state), **product.settings)
    assert subprocess.run(words, check=False, cwd=ROOT, env=settings).returncode == -signal.SIGKILL
    assert (product.state / "secret-key").read_bytes() != (backup / "secret-key").read_bytes()


class RestorableProduct(ProductWithCard):
    """A product whose agent state and fake hardware are outside its state directory, so the restore keeps them."""

    def __init__(self, product: Product, host: Path) -> None:
        self.host, self.card, self.acknowledged = host, "", list[str]()
        super().__init__(product)

    def provider_uuid(self) -> str:
        self.card = self.card or super().provider_uuid()
        return self.card

    def count_cards(self) -> int:
        """Return the number of fake cards in the tables that are not missing."""
        there = "SELECT count(*) FROM accelerators_device WHERE driver = 'fake_driver' AND state <> 'missing'"
        return int(self.product.rows(there)[0][0])

    def list_hardware_files(self, name: str = "*") -> list[Path]:
        return sorted((self.host / "agent" / "drivers" / "fake_driver").glob(f"*/0/{name}"))

    def instances_by_handle(self) -> dict[str, str]:
        """Return the instance of each attached handle according to the fake hardware."""
        return {path.name.removeprefix("mdev-"): path.read_text() for path in self.list_hardware_files("mdev-*")}

    def write_control_file(self, **words: object) -> None:
        (self.host / "new.json").write_text(json.dumps({"handle_type": "MDEV"} | words))
        (self.host / "new.json").replace(self.host / "fake.json")

    def profile_names(self) -> set[str]:
        return {one["name"] for one in self.call("GET", "/v2/device_profiles").json()["device_profiles"]}

    @contextmanager
    def create_profiles_meanwhile(self) -> Iterator[None]:
        """Create profiles in a thread during the block; add the names of those that were accepted to `acknowledged`."""
        over = threading.Event()

        def write() -> None:
            while not over.is_set():
                name = f"w-{len(self.acknowledged)}"
                groups = [{"resources:FPGA": "1"}]
                if self.call("POST", "/v2/device_profiles", [{"name": name, "groups": groups}]).status_code == 201:
                    self.acknowledged.append(name)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(30)


@pytest.fixture
def site(folder: Path) -> Iterator[RestorableProduct]:
    """A product with one ready fake card and an https public URL; its own agent connects directly by http."""
    (folder / "drivers.toml").write_text(f'[fake_driver]\ncontrol_file = "{folder}/fake.json"\n')
    (folder / "fake.json").write_text('{"handle_type": "MDEV"}')
    host = {"CYBORG_AGENT_STATE_DIR": f"{folder}/agent", "CYBORG_DRIVER_SETTINGS": f"{folder}/drivers.toml"}
    proxy = {"CYBORG_PUBLIC_URL": "https://accelerators.example"}
    with running(Product(folder / "state", SETTINGS | host | proxy)) as product:
        site = RestorableProduct(product, folder)
        site.post_action("enable")
        yield site


def test_L2_a_backup_taken_during_writes_restores_everything_acknowledged_before(site: RestorableProduct) -> None:
    product, load = site.product, Load(site.product, 2)
    assert {name for (name,) in product.rows("SELECT name FROM auth_group")} == ROLES
    assert [product.get(path)[0] for path in ("/admin/login/", "/healthz", "/readyz")] == [301, 200, 200]
    assert product.get("/admin/login/", X_Forwarded_Proto="https")[0] == 200
    users = product.rows(USERS)
    before, kept = site.bind_new_request()
    site.until_state(before, "Bound")
    agent = product.child("agent")
    assert agent
    os.kill(agent.pid, signal.SIGSTOP)
    meanwhile, waiting = site.bind_new_request()
    with load.reporting(), site.create_profiles_meanwhile():
        load.until_acknowledged(10)
        site.until(lambda: len(site.acknowledged) > 5, "profiles are made")
        profiles, reports = set(site.acknowledged), {host.name: host.acked for host in load.hosts}
        product.manage("backup", str(site.host / "backup"))
        load.until_acknowledged(5)
    os.kill(agent.pid, signal.SIGCONT)
    site.until_state(meanwhile, "Bound")
    site.write_control_file(count=2)
    site.until(lambda: site.count_cards() == 2, "a card that came after the backup")
    after, later = site.bind_new_request()
    site.until_state(after, "Bound")
    made = site.instances_by_handle()
    assert set(made.values()) == {kept, waiting, later}

    product.interrupt()
    product.state.rename(site.host / "lost")
    kill_restore_before_the_secret_key(product, site.host / "backup")
    with pytest.raises(AssertionError, match=r"was interrupted: run `manage\.py restore "):
        product.manage("restore", "--loaded")
    product.manage("restore", str(site.host / "backup"))
    product.start()

    assert (product.state / "secret-key").read_bytes() == (site.host / "backup" / "secret-key").read_bytes()
    assert profiles <= site.profile_names()
    applied = "SELECT name, applied_seq FROM accelerators_host WHERE name LIKE 'load%%'"
    site.until(lambda: all(seq >= reports[name] for name, seq in product.rows(applied)), "the reports of before")
    assert len(product.rows(applied)) == len(reports)
    assert product.rows(USERS) == users
    assert site.read_request(before)["state"] == "Bound"
    site.until_state(meanwhile, "Bound")  # its agent sends the result of the bind again
    assert site.call("GET", f"/v2/accelerator_requests/{after}").status_code == 404
    site.until(lambda: site.count_cards() == 2, "its agent shows again what it found since")
    assert "they match" in " ".join(product.manage("verify_events"))

    refused = site.call("POST", "/v2/accelerator_requests", {"device_profile_name": min(profiles)})
    assert refused.status_code == 503 and "restored from the backup" in refused.text
    product.manage("read_only", "off")
    other, _ = site.bind_new_request()
    site.until_state(other, "BindFailed")
    assert f"attached to {later}" in str(site.commands("attach")[0]["text"])
    assert site.instances_by_handle() == made, "what an instance got after the backup was taken from it"
    known, _ = site.bind_new_request(later)
    assert site.until_state(known, "Bound")["attach_handle_uuid"] in made
    assert site.instances_by_handle() == made
    site.call("DELETE", f"/v2/accelerator_requests?instance={later}")
    site.until(lambda: set(site.instances_by_handle().values()) == {kept, waiting}, "what is known is given back")
    assert json.loads(product.manage("verify_events", "--json")[0])["ok"]
