"""A site of 100 000 devices: the whole product over a seeded database, a thousand live hosts, a fake Nova, and the
model of Placement behind HTTP.

The seeded hosts (`seed-00001.example` and so on) have all but a thousand of the devices and no agents. The agents of
the live hosts (`tests.fleet.rollout_hosts`) carry out driver rollouts. The database is prepared once and copied.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cyborgweb.database.postgres import Postgres
from tests.bench.remote_calls import ChildProcess
from tests.fleet import rollout_hosts
from tests.support.cloud import SimulatedCloud, running_cloud
from tests.support.environment import without_settings
from tests.support.migrated import copy_prepared, migrate, read_migrations
from tests.system.product import ROOT, Product, environment, running

SEEDED_HOSTS, SEEDED_DEVICES, EVENTS = 1_000, 99_000, 100_000
LIVE_HOSTS = 1_000
CONNECTED_S = 60.0
"""Seconds that the agents of the live hosts may take to connect and to have their first reports applied."""


@dataclass
class LargeSite(SimulatedCloud):
    """The product, its live hosts, and the services that it asks for instances and tells about devices."""

    product: Product
    fleet: ChildProcess
    folder: Path

    @property
    def address(self) -> str:
        """The address of the product's web process."""
        return f"http://127.0.0.1:{self.product.port}"

    def break_hosts(self, *numbers: int) -> list[str]:
        """Let changes of drivers fail on these hosts until `repair_hosts` is called; return the hosts' names."""
        self.fleet.ask("set_broken", numbers=numbers)
        return [rollout_hosts.host_name(number) for number in numbers]

    def repair_hosts(self) -> None:
        """Let changes of drivers succeed on every host."""
        self.fleet.ask("set_broken", numbers=[])

    def knows_all_providers(self, host: str) -> bool:
        """Return whether nothing of this host has to be written to Placement any more."""
        query = "SELECT FROM accelerators_intent i JOIN accelerators_host h ON h.uuid::text = i.key"
        return not self.product.rows(f"{query} WHERE i.kind = 'provider' AND h.name = %s", host)

    @contextmanager
    def running_new_agent(self, pasted: str, devices: int) -> Iterator[None]:
        """Run the command that an operator pastes on a new host with `devices` simulated devices, for the block."""
        folder = self.folder / "new-host"
        folder.mkdir()
        (folder / "fake.json").write_text(f'{{"count": {devices}, "handles": 1}}')
        (folder / "drivers.toml").write_text(f'[fake_driver]\ncontrol_file = "{folder}/fake.json"\n')
        own = {"CYBORG_AGENT_STATE_DIR": str(folder / "agent"), "CYBORG_DRIVER_SETTINGS": str(folder / "drivers.toml")}
        own |= {"CYBORG_HOST_NODE": "new-host", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        assignment, command = shlex.split(pasted)
        name, _, value = assignment.partition("=")
        with (folder / "said.log").open("wb") as log:
            agent = subprocess.Popen(
                [command, "--die-with-parent"], cwd=ROOT, env=environment(**own | {name: value}), stdout=log, stderr=log
            )
        try:
            yield
        finally:
            agent.terminate()
            agent.wait(20)


@contextmanager
def running_large_site(folder: Path) -> Iterator[LargeSite]:
    """Run the site for the block, with its agents connected. `folder` is an empty folder with a short path."""
    with running_cloud() as cloud:
        settings = {"CYBORG_ENABLED_DRIVERS": "fake_driver"} | cloud.settings
        with running(Product(folder / "state", settings, copy_database=copy_seeded)) as product:
            with (folder / "fleet.log").open("wb") as log:
                fleet = ChildProcess("tests.fleet.rollout_hosts", log)
            try:
                site = LargeSite(cloud.nova, cloud.placement, product, fleet, folder)
                for number in range(LIVE_HOSTS):
                    site.create_compute_provider(rollout_hosts.host_name(number))
                fleet.ask("start", ports=[product.port], count=LIVE_HOSTS, devices=1, bad=0.0)
                product.until(lambda: _count_live_devices(product) == LIVE_HOSTS, CONNECTED_S, "the agents report")
                yield site
            finally:
                fleet.stop()


def _count_live_devices(product: Product) -> int:
    """Return how many devices of the live hosts were merged."""
    statement = (
        "SELECT count(*) FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id WHERE h.name LIKE %s"
    )
    ((count,),) = product.rows(statement, "cmp%")
    return int(count)


def copy_seeded(server: Postgres) -> Path:
    """Put a copy of the seeded data directory where `server` expects its own; return the copied cache entry."""
    sources = [ROOT / "accelerators" / "inventory" / name for name in ("seed.py", "seed_sql.py")]
    sources += [Path(rollout_hosts.__file__), Path(__file__)]
    content = b"".join([read_migrations(), *(path.read_bytes() for path in sources)])
    return copy_prepared(server, "seeded", content, _fill, kept=2)


def _fill(server: Postgres) -> None:
    """Create and migrate the database, seed it, and enrol the live hosts."""
    migrate(server)
    manage = [sys.executable, str(ROOT / "manage.py"), "seed", "--hosts", str(SEEDED_HOSTS)]
    manage += ["--devices", str(SEEDED_DEVICES), "--events", str(EVENTS)]
    manage += ["--without-providers"]  # the cloud has no compute providers of the seeded hosts
    enrol = [sys.executable, "-m", "tests.fleet.enrol_rollout_hosts", str(LIVE_HOSTS)]
    known = without_settings(CYBORG_STATE_DIR=str(server.home.parent))
    if server.pg_bin:
        known["CYBORG_PG_BIN"] = server.pg_bin
    for command in (manage, enrol):
        subprocess.run(command, check=True, cwd=ROOT, env=known)
