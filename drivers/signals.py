"""How a PCI function is, from sysfs alone: its link, its errors, its power, the temperatures below it.

Asked by `drivers.pci`. Sources: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats, Documentation/hwmon.
"""

from __future__ import annotations

from collections.abc import Iterator

from drivers.errors import DriverError
from drivers.inventory import Health, Sample
from drivers.machine import PCI_ADDRESS, PCI_DEVICES, Machine
from drivers.steps import Signal

AER = ("correctable", "nonfatal", "fatal")
MAX_SIGNALS = 64
MAX_PATH = 255


def status(machine: Machine, address: str) -> tuple[Health, str]:
    """Off the bus, or a link narrower than it could be. An idle link slows down, it stays wide."""
    path = f"{PCI_DEVICES}/{address}"
    if machine.read(f"{path}/vendor") == "0xffff" or machine.text(f"{path}/power_state") == "error":
        return "failed", "it does not answer on the bus"
    now, best = (machine.read_int(f"{path}/{name}_link_width", 0) for name in ("current", "max"))
    if 0 < now < best < 255:
        return "degraded", f"its PCIe link is x{now}, it could be x{best}"
    return "ok", ""


def bridges(machine: Machine, address: str) -> str:
    """Addresses of the PCI bridges above a function, root first, blanks between: its directory's place in sysfs is its
    place in the tree. Of more than fit the nearest."""
    place = machine.resolve(f"{PCI_DEVICES}/{address}").split("/")
    above = [name for name in place[:-1] if PCI_ADDRESS.fullmatch(name)]
    while len(text := " ".join(above)) > MAX_PATH:
        del above[0]
    return text


def signals(machine: Machine, address: str) -> tuple[Signal, ...]:
    """All that was read. Errors are counters since the start, the device's own and those of the port above it."""
    path = f"{PCI_DEVICES}/{address}"
    found = [
        *_value(machine, "driver", machine.link(f"{path}/driver") or "none", f"{path}/driver"),
        *_file(machine, "power_state", f"{path}/power_state"),
        *_file(machine, "link_width", f"{path}/current_link_width", limit=f"{path}/max_link_width"),
        *_file(machine, "link_speed", f"{path}/current_link_speed", limit=f"{path}/max_link_speed"),
        *_errors(machine, "", path),
    ]
    port = machine.resolve(path).split("/")[-2]
    if PCI_ADDRESS.fullmatch(port):
        found += _errors(machine, "port_", f"{PCI_DEVICES}/{port}")
    for sensor in _sensors(machine, address):
        found += _temperature(machine, sensor)
    return tuple(found[:MAX_SIGNALS])


def samples(machine: Machine, key: str, address: str) -> tuple[Sample, ...]:
    """The temperatures as numbers, in the order of the sensors; the first has no number in its name."""
    read = (machine.read_int(f"{sensor}_input", -(2**31)) for sensor in _sensors(machine, address))
    degrees = [value / 1000 for value in read if value > -(2**31)]
    names = (f"temperature_celsius{f'_{number}' if number else ''}" for number in range(MAX_SIGNALS))
    return tuple(Sample(key, name, value) for name, value in zip(names, degrees, strict=False))


def _value(machine: Machine, name: str, value: str, source: str, unit: str = "", limit: str = "") -> Iterator[Signal]:
    yield Signal(name[:64], value[:255], unit, limit[:64], source)


def _file(machine: Machine, name: str, source: str, limit: str = "") -> Iterator[Signal]:
    """An attribute that is there; one that cannot be read (a card in deep sleep) is left out."""
    if value := _text(machine, source):
        yield from _value(machine, name, value, source, limit=_text(machine, limit) if limit else "")


def _errors(machine: Machine, prefix: str, path: str) -> Iterator[Signal]:
    for kind in AER:
        source = f"{path}/aer_dev_{kind}"
        for line in _text(machine, source).splitlines():
            name, _, count = line.rpartition(" ")
            if name.startswith("TOTAL_ERR"):
                yield from _value(machine, f"{prefix}aer_{kind}", count, source)


def _sensors(machine: Machine, address: str) -> Iterator[str]:
    """`…/hwmon3/temp1`: also of what the function carries, as an NVMe controller's."""
    below = machine.resolve(f"{PCI_DEVICES}/{address}") + "/"
    for name in machine.names("/sys/class/hwmon"):
        path = f"/sys/class/hwmon/{name}"
        if machine.resolve(path).startswith(below):
            yield from (f"{path}/{file.removesuffix('_input')}" for file in machine.names(path, "temp*_input"))


def _temperature(machine: Machine, sensor: str) -> Iterator[Signal]:
    value, limit = (machine.read_int(f"{sensor}_{name}", -(2**31)) for name in ("input", "crit"))
    if value > -(2**31):
        label = _text(machine, f"{sensor}_label") or sensor.rpartition("/")[2]
        most = f"{limit / 1000:g}" if limit > -(2**31) else ""
        yield from _value(machine, f"temperature {label}", f"{value / 1000:g}", f"{sensor}_input", "°C", most)


def _text(machine: Machine, path: str) -> str:
    try:
        return machine.read(path)
    except DriverError:
        return ""
