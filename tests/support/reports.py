"""Small inventories for tests."""

from __future__ import annotations

from accelerators import conductor
from accelerators.diff import HostReport
from accelerators.models import Host
from drivers.inventory import AttachHandle, Attribute, Deployable, Device, DriverReport


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


def answer(*devices: Device, driver: str = "test_driver", error: str = "") -> DriverReport:
    """What one driver said."""
    return DriverReport(driver, error, tuple(devices))


def report(*drivers: DriverReport, seq: int = 1, epoch: int = 1) -> HostReport:
    """One report; its hash is its order."""
    return HostReport(epoch, seq, f"{epoch}.{seq}".rjust(32, "0"), drivers)


def a_host(name: str = "cmp1") -> Host:
    """A host with node = name."""
    return conductor.ensure_host(name, name, "test")


def apply(host: Host, *drivers: DriverReport, seq: int = 1) -> int:
    """Apply one report of `host`."""
    return conductor.apply({host.id: [report(*drivers, seq=seq)]})
