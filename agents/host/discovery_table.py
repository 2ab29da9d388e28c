"""Format what the drivers of this host find, as a table or as JSON, for `cyborg-agent --once`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from drivers.inventory import Device, DriverReport

HEADINGS = ("DRIVER", "TYPE", "VENDOR", "MODEL", "ADDRESS", "NUMA", "STATUS", "UNITS", "DEVICE")


def render_json(reports: Sequence[DriverReport]) -> str:
    """Return the driver reports as one indented JSON array, with the same fields that the agent sends."""
    return msgspec.json.format(msgspec.json.encode(reports), indent=2).decode() + "\n"


def render_table(reports: Sequence[DriverReport], host: str, limitations: Mapping[str, Sequence[str]]) -> str:
    """Return a table with one line per device, followed by faults, failed drivers, and what drivers cannot use here.

    `limitations` is driver → the reasons why it cannot use all features of this host.
    """
    rows = [_build_row(report.driver, device) for report in reports for device in report.devices]
    lines = [f"{host}: {len(rows)} {'device' if len(rows) == 1 else 'devices'}"]
    if rows:
        lines += ["", *_align_columns([HEADINGS, *rows])]
    faults = [f"  {r.driver}  {f.subject}: {f.reason}" for r in reports for f in r.faults]
    if faults:
        lines += ["", "Skipped, with the reason:", *faults]
    errors = [f"  {r.driver}: {r.error.removeprefix(f'{r.driver}: ')}" for r in reports if r.error]
    if errors:
        lines += ["", "Drivers that failed:", *errors]
    if limitation_lines := [f"  {driver}: {reason}" for driver, reasons in limitations.items() for reason in reasons]:
        lines += ["", "Features that cannot be used on this host:", *limitation_lines]
    return "\n".join(lines) + "\n"


def _build_row(driver: str, device: Device) -> tuple[str, ...]:
    """Return the table's cells for one device, in the order of HEADINGS; UNITS is the number of its accelerators."""
    status = f"{device.status} ({device.status_reason})" if device.status_reason else device.status
    return (
        driver,
        device.type,
        device.vendor,
        device.model,
        device.address or "-",
        str(device.numa_node) if device.numa_node >= 0 else "-",
        status,
        str(sum(deployable.num_accelerators for deployable in device.deployables)),
        device.key,
    )


def _align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return one line per row, with the columns padded to equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
