"""Build small inventories and reports for tests."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from msgspec.structs import replace

from accelerators import conductor
from accelerators.domain.diff import HostReport
from accelerators.inventory import merge
from accelerators.models import Host
from agents.models import Agent, Lease
from drivers.inventory import AttachHandle, Attribute, Backend, Deployable, Device, DriverReport, Service


def make_card(n: int = 0, handles: int = 1, **changes: object) -> Device:
    """Return a plain FPGA at PCI bus `n` with `handles` attach handles; `changes` replace fields of the device."""
    address = f"0000:{n:02x}:00.0"
    info = '{"bus": "%02x", "device": "00", "domain": "0000", "function": "%x"}'
    units = tuple(AttachHandle("PCI", info % (n, f)) for f in range(handles))
    attributes = (Attribute("rc", "FPGA"), Attribute("trait0", "CUSTOM_TEST"))
    deployable = Deployable(f"cmp1_{address}", handles, attributes, units, "test")
    values: dict[str, object] = {"key": f"pci:{address}", "type": "FPGA", "vendor": "1af4", "model": "1044"}
    values |= {"address": address, "deployables": (deployable,)} | changes
    return Device(**values)  # type: ignore[arg-type]


def make_driver_report(
    *devices: Device, driver: str = "test_driver", error: str = "", backends: tuple[Backend, ...] = ()
) -> DriverReport:
    """Return the report of one driver, with its devices or its error."""
    return DriverReport(driver, error, tuple(devices), backends=backends)


def make_report(*drivers: DriverReport, seq: int = 1, epoch: int = 1) -> HostReport:
    """Return a host report; its hash is made of epoch and sequence number, not of the content."""
    return HostReport(epoch, seq, f"{epoch}.{seq}".rjust(32, "0"), drivers)


def get_or_create_host(name: str = "cmp1") -> Host:
    """Return the host with this name; create it, with `node` equal to its name, if it does not exist."""
    return conductor.ensure_host(name, name, "test")


def create_heard_host(name: str, devices: int) -> Host:
    """Create a host with a current lease and `devices` cards of one backend; one of its two drivers has an error."""
    host = get_or_create_host(name)
    cards = [make_card(bus, handles=2) for bus in range(devices)]
    cards_backend = Backend("cards", "pci", services=(Service("reset", limits={"methods": "flr"}),))
    apply_report(
        host,
        make_driver_report(*cards, driver="pci_driver", backends=(cards_backend,)),
        make_driver_report(driver="slow_driver", error="it hung for 20 s"),
    )
    Agent.objects.create(host=host, public_key=f"key of {host.name}", version="0.1.0", wire="v1", boot_id="b1")
    Lease.objects.create(host=host, seen_at=datetime.now(UTC))
    return host


def apply_report(host: Host, *drivers: DriverReport, seq: int = 1) -> int:
    """Merge one report of `host` into the database; its cards' providers are named after the host's node."""
    return merge.merge_reports({host.id: [make_report(*name_providers(host, *drivers), seq=seq)]})


def name_providers(host: Host, *drivers: DriverReport) -> tuple[DriverReport, ...]:
    """Return the reports with deployables named after the host's node, where `make_card` named them `cmp1_…`.

    A provider belongs to one host. The cards of the host cmp1, which most tests use, keep the names of `make_card`.
    """
    if host.name == "cmp1":
        return drivers
    return tuple(
        replace(report, devices=tuple(name_providers_of_device(host.node, device) for device in report.devices))
        for report in drivers
    )


def name_providers_of_device(node: str, device: Device) -> Device:
    """Return the device with deployables named after the node, where `make_card` named them `cmp1_…`."""
    parts = (replace(part, name=re.sub("^cmp1_", f"{node}_", part.name)) for part in device.deployables)
    return replace(device, deployables=tuple(parts))
