"""Test `placement_sync` with a real Placement while others write to the same providers, and over an unreliable network.

Afterwards the provider tree must be right, values that others wrote must be kept, no allocation may be lost, and one
more run must write nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from keystoneauth1.session import Session

from placement_sync import client
from placement_sync.mapping import DeployableRecord, compute_desired_providers
from tests.support.webserver import until
from tests.system import failing_proxy
from tests.system.test_placement import HostInPlacement, session, site

__all__ = ["session", "site"]
pytestmark = pytest.mark.system
CARDS = [f"card{n}" for n in range(4)]
ROUNDS, SHARE = 10, 0.08
MAX_TRIES = 60
TIMEOUT_S = 0.6
"""The client's time-out: shorter than a slow answer of the proxy (SLOW_S), longer than Placement takes."""


def sync_until_done(site: HostInPlacement, parts: list[DeployableRecord], **more: Any) -> int:
    """Synchronise, and retry after conflicts and failures as the job does; return the number of tries."""
    for tried in range(1, MAX_TRIES):
        try:
            site.sync_parts(*parts, **more)
            return tried
        except (client.PlacementUnavailableError, client.PlacementConflictError):
            continue
    raise AssertionError("never done")


def check_synchronized(site: HostInPlacement, parts: list[DeployableRecord]) -> None:
    """Check that Placement has the wanted providers and values, and that one more run writes nothing."""
    shown = {one["uuid"]: one for one in site.placement.tree(site.root).values()}
    for wanted in compute_desired_providers(parts)[0].values():
        now = shown[wanted.uuid]
        entry = now["inventories"][wanted.resource_class]
        assert (now["name"], now["parent_provider_uuid"]) == (wanted.name, site.root)
        assert (entry["total"], entry["reserved"]) == (wanted.total, wanted.reserved)
        assert wanted.traits <= set(now["traits"])
    site.sync_parts(*parts)
    assert site.client.writes == 0


@dataclass
class RivalWriters:
    """Three other writers to one provider, each a thread that writes without pause.

    `write_counts` is the number of writes of each by its name; `held` maps kept allocations to their provider.
    """

    site: HostInPlacement
    session: Session
    write_counts: dict[str, int] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def writing_meanwhile(self, name: str) -> Iterator[None]:
        """Run the writers during the block, which begins when each of them has written at least once."""
        todo: list[Callable[[client.PlacementClient, str, int], None]] = [self.ratio, self.trait, self.allocation]
        threads = [threading.Thread(target=self._run, args=(one, self.site.provider_uuid(name))) for one in todo]
        for thread in threads:
            thread.start()
        try:
            until(lambda: len(self.write_counts) == len(todo), 30)
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()

    def _run(self, write: Callable[[client.PlacementClient, str, int], None], provider: str) -> None:
        mine, number = client.PlacementClient(self.session), 0
        while not self.stop.is_set():
            try:
                write(mine, provider, number := number + 1)
                self.write_counts[write.__name__] = number
            except (client.PlacementConflictError, AssertionError):
                continue

    def ratio(self, mine: client.PlacementClient, provider: str, number: int) -> None:
        """Change the allocation ratio, as an operator does, and the inventory of a foreign resource class."""
        seen = mine.read_provider(provider)
        assert seen
        known = {name: {**entry, "allocation_ratio": 1.0 + number % 3} for name, entry in seen.inventories.items()}
        mine.set_inventories(provider, seen.generation, known | {"VGPU": {"total": number}})

    def trait(self, mine: client.PlacementClient, provider: str, number: int) -> None:
        """Replace the writer's own trait by another one."""
        seen = mine.read_provider(provider)
        assert seen
        kept = {name for name in seen.traits if not name.startswith("CUSTOM_RIVAL")}
        mine.set_traits(provider, seen.generation, kept | {f"CUSTOM_RIVAL{number % 5}"})

    def allocation(self, _: client.PlacementClient, provider: str, number: int) -> None:
        """Allocate one unit and release it, but keep every third allocation until there are four."""
        consumer = self.site.placement.allocate(provider, 1)
        if number % 3 or len(self.held) == 4:
            self.site.placement.release(consumer)
        else:
            self.held[consumer] = provider


def test_our_values_and_those_of_three_rival_writers_are_all_kept(site: HostInPlacement, session: Session) -> None:
    site.sync_parts(site.make_part(total=64))
    rivals = RivalWriters(site, session)
    with rivals.writing_meanwhile("FakeDevice"):
        for total in (32, 48, 24, 40):
            sync_until_done(site, [site.make_part(total=total, traits1=f"CUSTOM_OURS{total}")])
    parts = [site.make_part(total=40, traits1="CUSTOM_OURS40")]
    sync_until_done(site, parts)
    check_synchronized(site, parts)
    shown = site.read_providers()["FakeDevice"]
    assert shown["inventories"]["VGPU"]["total"] == rivals.write_counts["ratio"]
    assert [name for name in shown["traits"] if name.startswith("CUSTOM_OURS")] == ["CUSTOM_OURS40"]
    assert [name for name in shown["traits"] if name.startswith("CUSTOM_RIVAL")]
    holders = site.placement.call("GET", f"/resource_providers/{site.provider_uuid()}/allocations")["allocations"]
    assert rivals.held.keys() <= holders.keys()


def test_placement_converges_over_a_connection_that_fails_at_random(site: HostInPlacement) -> None:
    """Calls fail in all TROUBLE_KINDS, before or after Placement ran them; cards appear, change and vanish."""
    chance, held = random.Random(11), dict[str, str]()
    with failing_proxy.trouble_proxy(site.placement.url) as line:
        for _ in range(ROUNDS):
            parts = [_make_random_part(site, name, chance) for name in CARDS if chance.random() < 0.8]
            line.share = SHARE
            sync_until_done(site, parts, endpoint=line.url, timeout_s=TIMEOUT_S)
            line.share = 0.0
            check_synchronized(site, parts)
            for part in parts:
                if part.is_offered and part.attributes["rc"] == "FPGA" and len(held) < 3:
                    held[site.placement.allocate(site.provider_uuid(part.name.removeprefix(f"{site.host}_")), 1)] = (
                        part.name
                    )
            for consumer in held:
                assert site.placement.call("GET", f"/allocations/{consumer}")["allocations"], held[consumer]
    assert set(line.made) == set(failing_proxy.TROUBLE_KINDS)
    for consumer in held:
        site.placement.release(consumer)
    site.sync_parts()
    assert site.read_providers() == {}


def _make_random_part(site: HostInPlacement, name: str, chance: random.Random) -> DeployableRecord:
    total, offered = chance.randrange(4, 16), chance.random() < 0.7
    attributes = {"rc": chance.choice(["FPGA", "PGPU"]), "traits1": f"CUSTOM_SOME{chance.randrange(4)}"}
    return site.make_part(name, total, offered, **attributes)
