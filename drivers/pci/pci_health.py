"""Read the health and load of a PCI function from sysfs: its link, errors, power, temperatures and utilization.

Sources: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats and sysfs-driver-intel-{i915,xe}-hwmon,
Documentation/hwmon, Documentation/gpu/amdgpu, drivers/accel/ivpu/ivpu_sysfs.c, drivers/pci/{pci,pci-sysfs,probe}.c.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drivers.errors import DriverError, Failed, Gone, Timeout
from drivers.inventory import Health, Sample
from drivers.machine import PCI_ADDRESS, PCI_DEVICES, Machine
from drivers.pci import config_space
from drivers.plan import Signal

ERROR_KINDS = ("correctable", "nonfatal", "fatal")
MAX_SIGNALS = 64
MAX_PATH = 255
NO_FUNCTION_IDS = frozenset({0xFFFF_FFFF, 0x0000_0000, 0x0000_FFFF, 0xFFFF_0000})
"""Values of the first four bytes of configuration space (vendor and device id) if no function answers
(pci_bus_generic_read_dev_vendor_id in drivers/pci/probe.c)."""
NOT_READY_IDS = 0xFFFF_0001
"""Value of these bytes while a function answers that it is not ready yet, which it may do after a reset."""
LINK_WIDTH_DOWN = 63
"""The width that the link status register shows if it reads as all ones: the link is down."""
UNREADABLE = -(2**31)
"""A value that no sensor has; it stands for a sensor that cannot be read."""
FUNCTION_METRICS = (
    ("gpu_busy_percent", "utilization_percent", 1),
    ("mem_info_vram_used", "memory_used_bytes", 1),
    ("mem_info_vram_total", "memory_total_bytes", 1),
    ("npu_memory_utilization", "memory_used_bytes", 1),
    ("npu_busy_time_us", "busy_seconds_total", 10**6),
)
"""(File of a function, its metric, how many units of the file are one unit of the metric)."""
HWMON_METRICS = (
    ("power1_average", "power_watts", 10**6),
    ("power1_input", "power_watts", 10**6),
    ("energy1_input", "energy_joules_total", 10**6),
)
"""The same for files of its hwmon directories; the first readable file of a metric is used."""


def read_status(machine: Machine, address: str) -> tuple[Health, str]:
    """Return the health of a function and its reason ('' for ok).

    A function is `failed` if it does not answer on the bus, if the kernel cannot set its power state, if its link is
    down, or if reading its configuration space waits for longer than any reset takes (`config_space`). A function is
    `degraded` if its PCIe link is narrower than it could be, or if the kernel has counted fatal errors of the function
    or of the port above it. A function is `unknown` if its configuration space cannot be read, and while it is powered
    off to save energy: then it is not read, because that would power it on. The link speed is ignored, because an idle
    link slows down but keeps its width. Raises Gone if the function is absent, and another DriverError if its power
    state cannot be read.
    """
    path = _find_answering_path(machine, address)
    if is_powered_off(machine, path):
        return "unknown", "it is powered off while nobody uses it (D3cold), so its health is not read"
    try:
        failure = _find_failure(machine, path)
    except Timeout as error:
        return "failed" if config_space.is_stuck(path) else "unknown", str(error)
    except DriverError as error:
        if isinstance(error, Gone) and not machine.exists(f"{PCI_DEVICES}/{address}"):
            raise
        return "unknown", f"its configuration space cannot be read: {error}"
    if failure:
        return "failed", failure
    current_width, max_width = (machine.read_int(f"{path}/{name}_link_width", 0) for name in ("current", "max"))
    reasons = [f"its PCIe link is x{current_width}, it could be x{max_width}"] * (0 < current_width < max_width < 255)
    if fatal_errors := _count_fatal_errors(machine, path):
        reasons.append(f"fatal PCIe errors since it was found: {fatal_errors}")
    return "degraded" if reasons else "ok", "; ".join(reasons)


def _find_failure(machine: Machine, path: str) -> str:
    """Return why the function at `path` cannot be used, with what to do about it; '' if it answers.

    Raises DriverError if its configuration space cannot be read.
    """
    if machine.text(f"{path}/power_state") == "error":
        return "the kernel cannot set its power state: power the host off and on, or replace the card"
    id_bytes = config_space.read_config_space(machine, path, 4)
    if len(id_bytes) < 4:
        raise Failed(f"{path}/config: it ends after {len(id_bytes)} bytes")
    ids = int.from_bytes(id_bytes, "little")
    if ids in NO_FUNCTION_IDS:
        return "it does not answer on the bus: reset it, power the host off and on, or replace the card"
    if ids == NOT_READY_IDS:
        return "it is not ready after a reset: power the host off and on, or replace the card"
    if machine.read_int(f"{path}/current_link_width", 0) == LINK_WIDTH_DOWN:
        return "its PCIe link is down: check that the card sits firmly, or replace it"
    return ""


def _find_answering_path(machine: Machine, address: str) -> str:
    """Return the directory of the function whose configuration space tells whether `address` answers.

    For a virtual function that is its physical function, because its own ids always read as all ones
    (pci_device_is_present in drivers/pci/pci.c).
    """
    physical_function = machine.link(f"{PCI_DEVICES}/{address}/physfn")
    return f"{PCI_DEVICES}/{physical_function or address}"


def is_powered_off(machine: Machine, path: str) -> bool:
    """Return whether the kernel has powered the function off because nobody uses it.

    In that state the kernel would power the function on for each read of its configuration space
    (pci_config_pm_runtime_get in drivers/pci/pci.c), and registers that are read in other ways are all ones. A function
    in D3cold that is not suspended could not be powered on again, so it has to be read. Raises DriverError.
    """
    return (
        machine.text(f"{path}/power_state") == "D3cold" and machine.text(f"{path}/power/runtime_status") == "suspended"
    )


def _count_fatal_errors(machine: Machine, path: str) -> int:
    """Return how many fatal errors (AER) the kernel has counted for the function and for the port above it.

    An error on the link may be counted at either end. A count that cannot be read is 0.
    """
    counts = [_read_error_total(machine, path, "fatal")]
    if port := _find_port(machine, path):
        counts.append(_read_error_total(machine, port, "fatal"))
    return sum(int(count) for count in counts if count.isdecimal())


def _find_port(machine: Machine, path: str) -> str:
    """Return the directory of the PCI port above the function at `path`; '' if it is directly on a root bus."""
    name = machine.resolve(path).split("/")[-2]
    return f"{PCI_DEVICES}/{name}" if PCI_ADDRESS.fullmatch(name) else ""


def list_bridges(machine: Machine, address: str) -> str:
    """Return the addresses of the PCI bridges above a function, root first, separated by blanks.

    They are the parents of its directory in sysfs. If the text exceeds MAX_PATH, the bridges nearest the root are
    dropped.
    """
    path_parts = machine.resolve(f"{PCI_DEVICES}/{address}").split("/")
    bridge_addresses = [name for name in path_parts[:-1] if PCI_ADDRESS.fullmatch(name)]
    while len(text := " ".join(bridge_addresses)) > MAX_PATH:
        del bridge_addresses[0]
    return text


def read_signals(machine: Machine, address: str) -> tuple[Signal, ...]:
    """Return the readings of a function, at most MAX_SIGNALS; values that cannot be read are left out.

    Errors are counted since the device's start, for the function itself and for the port above it. The link and the
    temperatures of a function that is powered off to save energy are not read, because that would power it on.
    """
    path = f"{PCI_DEVICES}/{address}"
    readings = [
        *_make_signal(machine, "driver", machine.link(f"{path}/driver") or "none", f"{path}/driver"),
        *_read_signal(machine, "power_state", f"{path}/power_state"),
        *_read_error_signals(machine, "", path),
    ]
    if port := _find_port(machine, path):
        readings += _read_error_signals(machine, "port_", port)
    if not is_powered_off(machine, path):
        readings += _read_signal(machine, "link_width", f"{path}/current_link_width", limit=f"{path}/max_link_width")
        readings += _read_signal(machine, "link_speed", f"{path}/current_link_speed", limit=f"{path}/max_link_speed")
        for sensor in _find_temperature_sensors(machine, _find_hwmon_folders(machine, address)):
            readings += _read_temperature(machine, sensor)
    return tuple(readings[:MAX_SIGNALS])


def read_samples(machine: Machine, key: str, address: str) -> tuple[Sample, ...]:
    """Return the load of a function as samples with the device key `key`: error counters and present values.

    Values that cannot be read are left out, and at most MAX_SIGNALS samples are returned. Present values are not read
    while the function is suspended, because reading would wake it. Temperatures are numbered in the order of the
    sensors; the first has no number in its name.
    """
    path = f"{PCI_DEVICES}/{address}"
    counts = {kind: _read_error_total(machine, path, kind) for kind in ERROR_KINDS}
    values = {f"errors_{kind}_total": float(count) for kind, count in counts.items() if count.isdecimal()}
    if _read_or_empty(machine, f"{path}/power/runtime_status") != "suspended":
        values |= _read_present_values(machine, path, address)
    return tuple(Sample(key, metric, value) for metric, value in values.items())[:MAX_SIGNALS]


def _read_present_values(machine: Machine, path: str, address: str) -> dict[str, float]:
    """Return metric → value for every metric and temperature that can be read.

    The values are in the units that the names of the metrics state.
    """
    values: dict[str, float] = {}
    monitors = list(_find_hwmon_folders(machine, address))
    for folder, files in [(path, FUNCTION_METRICS), *((monitor, HWMON_METRICS) for monitor in monitors)]:
        for name, metric, units in files:
            if metric not in values and (value := machine.read_int(f"{folder}/{name}", UNREADABLE)) > UNREADABLE:
                values[metric] = value / units
    millidegrees = (
        machine.read_int(f"{sensor}_input", UNREADABLE) for sensor in _find_temperature_sensors(machine, monitors)
    )
    for number, value in enumerate(value for value in millidegrees if value > UNREADABLE):
        values[f"temperature_celsius{f'_{number}' if number else ''}"] = value / 1000
    return values


def _make_signal(
    machine: Machine, name: str, value: str, source: str, unit: str = "", limit: str = ""
) -> Iterator[Signal]:
    """Yield one signal, with its texts cut to the sizes that a report allows."""
    yield Signal(name[:64], value[:255], unit, limit[:64], source)


def _read_signal(machine: Machine, name: str, source: str, limit: str = "") -> Iterator[Signal]:
    """Yield the attribute as a signal; nothing if it is empty or cannot be read (as of a card in deep sleep)."""
    if value := _read_or_empty(machine, source):
        yield from _make_signal(machine, name, value, source, limit=_read_or_empty(machine, limit) if limit else "")


def _read_error_signals(machine: Machine, prefix: str, path: str) -> Iterator[Signal]:
    """Yield a signal for each kind of AER errors that the kernel counts for the device at `path`."""
    for kind in ERROR_KINDS:
        if count := _read_error_total(machine, path, kind):
            yield from _make_signal(machine, f"{prefix}aer_{kind}", count, f"{path}/aer_dev_{kind}")


def _read_error_total(machine: Machine, device_path: str, kind: str) -> str:
    """Return the kernel's count of AER errors of a kind for the device at `device_path`; '' if it counts none."""
    lines = (line.rpartition(" ") for line in _read_or_empty(machine, f"{device_path}/aer_dev_{kind}").splitlines())
    return next((count for name, _, count in lines if name.startswith("TOTAL_ERR")), "")


def _find_hwmon_folders(machine: Machine, address: str) -> Iterator[str]:
    """Yield the hwmon directories (`/sys/class/hwmon/hwmon3`) of a function and of devices below it, such as an NVMe
    controller."""
    below = machine.resolve(f"{PCI_DEVICES}/{address}") + "/"
    for name in machine.names("/sys/class/hwmon"):
        path = f"/sys/class/hwmon/{name}"
        if machine.resolve(path).startswith(below):
            yield path


def _find_temperature_sensors(machine: Machine, monitors: Iterable[str]) -> Iterator[str]:
    """Yield the path prefix of each temperature sensor (`…/hwmon3/temp1`)."""
    for path in monitors:
        yield from (f"{path}/{file.removesuffix('_input')}" for file in machine.names(path, "temp*_input"))


def _read_temperature(machine: Machine, sensor: str) -> Iterator[Signal]:
    """Yield the temperature of a sensor in °C, with its critical limit if it has one; nothing if it cannot be read."""
    value, limit = (machine.read_int(f"{sensor}_{name}", UNREADABLE) for name in ("input", "crit"))
    if value > UNREADABLE:
        label = _read_or_empty(machine, f"{sensor}_label") or sensor.rpartition("/")[2]
        limit_text = f"{limit / 1000:g}" if limit > UNREADABLE else ""
        yield from _make_signal(
            machine, f"temperature {label}", f"{value / 1000:g}", f"{sensor}_input", "°C", limit_text
        )


def _read_or_empty(machine: Machine, path: str) -> str:
    """Return the text of a file; '' if it cannot be read for any reason."""
    try:
        return machine.read(path)
    except DriverError:
        return ""
