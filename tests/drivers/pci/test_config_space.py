"""Tests of a card whose configuration space cannot be read because the read waits in the kernel.

A FIFO without a writer stands for it: a read of it waits, too, and cannot be cancelled.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivers.base import Findings
from drivers.errors import Timeout
from drivers.pci import config_space
from drivers.pci.functions import PciDriver
from drivers.plan import Ask
from tests.drivers.tree import FakeHost

DEAD, ALIVE = "0000:3b:00.0", "0000:5e:00.0"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHost]:
    """Return a host with two cards, one of which does not answer; its reads are ended after the test."""
    monkeypatch.setattr(config_space, "READ_S", 0.2)
    host = FakeHost(tmp_path)
    for address in (DEAD, ALIVE):
        host.pci(address, "0x10de", "0x1eb8", "0x030200", reset="")
    fifo = host.sys / f"bus/pci/devices/{DEAD}/config"
    fifo.unlink()
    os.mkfifo(fifo)
    yield host
    end_reads(fifo)


def end_reads(fifo: Path) -> None:
    """Let the reads of the FIFO return, and replace it by a file with the ids of a card that answers."""
    for call in [*config_space._late_reads.values()]:
        os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK)) if fifo.is_fifo() else None
        call.has_ended_within(5)
    fifo.unlink()
    fifo.write_bytes(b"\xde\x10\xb8\x1e")


def discover(host: FakeHost) -> Findings:
    return PciDriver().discover(host.machine, {"rules": [{"vendor": "10de"}]})


def test_a_card_whose_read_does_not_return_keeps_one_thread_and_the_other_cards_are_offered(host: FakeHost) -> None:
    threads = threading.active_count()
    for attempt in range(3):
        begin = time.monotonic()
        findings = discover(host)
        duration_s = time.monotonic() - begin
        assert not findings.faults
        dead, alive = findings.devices
        assert (dead.address, dead.status, alive.address, alive.status) == (DEAD, "unknown", ALIVE, "ok")
        assert "reading its configuration space does not return" in dead.status_reason
        assert threading.active_count() == threads + 1, "no second read of the card is begun"
        assert attempt == 0 or duration_s < 0.2, "a card that is known to be late is not waited for again"


@pytest.mark.parametrize(
    "ask_driver",
    [
        lambda machine: PciDriver().health(machine, {}, Ask(f"pci:{DEAD}")),
        lambda machine: PciDriver().reset(machine, {}, Ask("serial:10de:0123456789abcdef:0", address=DEAD)),
    ],
    ids=["health", "reset"],
)
def test_every_question_about_such_a_card_is_answered(host: FakeHost, ask_driver: Callable[[object], object]) -> None:
    assert ask_driver(host.machine)


def test_a_card_is_failed_when_its_read_waits_longer_than_any_reset_and_ok_when_it_answers_again(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert discover(host).devices[0].status == "unknown", "a reset may take a minute"
    monkeypatch.setattr(config_space, "LONGEST_RESET_S", 0.0)
    first, second = (discover(host).devices[0] for _ in range(2))
    assert (first.status, first.status_reason) == (second.status, second.status_reason), "no new report"
    assert first.status == "failed" and "power the host off and on, or replace the card" in first.status_reason
    end_reads(host.sys / f"bus/pci/devices/{DEAD}/config")
    assert discover(host).devices[0].status == "ok"


@pytest.mark.slow
def test_many_late_cards_together_take_little_longer_than_one(host: FakeHost) -> None:
    paths = []
    for number in range(30):
        path = host.pci(f"0000:{number:02x}:01.0", "0x1af4", "0x1041", "0x020000")
        (path / "config").unlink()
        os.mkfifo(path / "config")
        paths.append(path)
    begin = time.monotonic()
    for path in paths:
        with pytest.raises(Timeout):
            config_space.read_config_space(host.machine, str(path).removeprefix(str(host.sys.parent)), 4)
    assert time.monotonic() - begin < 0.2 * 8, "not 30 times as long"
    for path in paths:
        os.close(os.open(path / "config", os.O_RDWR | os.O_NONBLOCK))
