"""Small inventories for tests."""

from __future__ import annotations

from datetime import UTC, datetime

from accelerators import conductor
from accelerators.domain.diff import HostReport
from accelerators.inventory import merge
from accelerators.models import Host
from agents.models import Agent, Lease
from drivers.inventory import AttachHandle, Attribute, Backend, Deployable, Device, DriverReport, Service


def card(n: int = 0, handles: int = 1, **changes: object) -> Device:
    """A plain FPGA at bus `n`."""
    address = f"0000:{n:02x}:00.0"
    info = '{"bus": "%02x", "device": "00", "domain": "0000", "function": "%x"}'
    units = tuple(AttachHandle("PCI", info % (n, f)) for f in range(handles))
    attributes = (Attribute("rc", "FPGA"), Attribute("trait0", "CUSTOM_TEST"))
    deployable = Deployable(f"node_{address}", handles, attributes, units, "test")
    values: dict[str, object] = {"key": f"pci:{address}", "type": "FPGA", "vendor": "1af4", "model": "1044"}
    values |= {"address": address, "deployables": (deployable,)} | changes
    return Device(**values)  # type: ignore[arg-type]


def answer(
    *devices: Device, driver: str = "test_driver", error: str = "", backends: tuple[Backend, ...] = ()
) -> DriverReport:
    """What one driver said."""
    return DriverReport(driver, error, tuple(devices), backends=backends)


def report(*drivers: DriverReport, seq: int = 1, epoch: int = 1) -> HostReport:
    """One report; its hash is its order."""
    return HostReport(epoch, seq, f"{epoch}.{seq}".rjust(32, "0"), drivers)


def a_host(name: str = "cmp1") -> Host:
    """A host with node = name."""
    return conductor.ensure_host(name, name, "test")


def a_heard_host(name: str, devices: int) -> Host:
    """A host of so many cards, of one backend, whose agent was just heard, and of whose two drivers one fails."""
    host = a_host(name)
    cards = [card(bus, handles=2) for bus in range(devices)]
    cards_backend = Backend("cards", "pci", services=(Service("reset", limits={"methods": "flr"}),))
    apply(
        host,
        answer(*cards, driver="pci_driver", backends=(cards_backend,)),
        answer(driver="slow_driver", error="it hung for 20 s"),
    )
    Agent.objects.create(host=host, public_key=f"key of {host.name}", version="0.1.0", wire="v1", boot_id="b1")
    Lease.objects.create(host=host, seen_at=datetime.now(UTC))
    return host


def apply(host: Host, *drivers: DriverReport, seq: int = 1) -> int:
    """Apply one report of `host`."""
    return merge.apply({host.id: [report(*drivers, seq=seq)]})
