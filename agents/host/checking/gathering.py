"""Gather the facts that `cyborg-agent check` judges: read the host, ask the drivers and the conductor. Nothing is
written."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agents import wire
from agents.host.checking.facts import (
    ConductorFacts,
    ConnectionProblem,
    DriverFacts,
    KernelFacts,
    RightsFacts,
    SriovCard,
)
from agents.host.connection import http
from drivers.errors import DriverError
from drivers.inventory import DriverReport
from drivers.isolation.runner import DriverProcess
from drivers.isolation.threads import run_in_thread
from drivers.machine import MAX_TABLE, PCI_DEVICES, Machine
from drivers.pci import iommu
from drivers.pci.binding import DRIVERS_FOLDER, read_bound_driver
from drivers.pci.host_usage import find_functions_used_by_host
from drivers.pci.iommu import list_virtual_functions
from drivers.pci.ownership import resolve_conflicts

CONNECT_S = 10.0
"""Time-out in seconds for the conductor's answer."""
CAPABILITY_BITS = {"CAP_DAC_OVERRIDE": 1, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21}
"""Capability → number of its bit in `CapEff` of /proc/self/status (include/uapi/linux/capability.h)."""


def gather_kernel(machine: Machine) -> KernelFacts:
    """Read the facts about the kernel: its release, IOMMU groups, VFIO drivers, SR-IOV cards and PCI functions.

    Raises DriverError if a file of /sys or /proc, or a table of kernel modules, cannot be read.
    """
    release = machine.text("/proc/sys/kernel/osrelease")
    functions = machine.pci_functions()
    groups = {iommu.find_group(machine, address) for address in functions} - {""}
    totals = {address: machine.read_int(f"{PCI_DEVICES}/{address}/sriov_totalvfs", 0) for address in functions}
    return KernelFacts(
        release,
        len(groups),
        "" if groups else iommu.describe_missing_iommu(machine),
        tuple(name for name in machine.names(DRIVERS_FOLDER) if iommu.is_vfio_driver(name)),
        _is_module_installed(machine, release, "vfio-pci"),
        tuple(
            SriovCard(
                address, total, len(list_virtual_functions(machine, address)), read_bound_driver(machine, address)
            )
            for address, total in totals.items()
            if total > 0
        ),
        {address: machine.text(f"{PCI_DEVICES}/{address}/modalias") for address in functions},
    )


def gather_rights(machine: Machine, state_dir: Path) -> RightsFacts:
    """Read the rights of this process, and whether it can use `state_dir`. Raises DriverError if a table of /proc
    cannot be read."""
    status = dict(line.split(":", 1) for line in machine.text("/proc/self/status").splitlines() if ":" in line)
    mask, uids = int(status.get("CapEff", "0").strip(), 16), status.get("Uid", "0 0").split()
    return RightsFacts(
        int(uids[min(1, len(uids) - 1)]),
        frozenset(name for name, bit in CAPABILITY_BITS.items() if mask & 1 << bit),
        _is_sys_read_only(machine),
        str(state_dir),
        explain_unusable_directory(state_dir),
    )


async def gather_host_usage(machine: Machine) -> tuple[Mapping[str, str], str]:
    """Return two values: the PCI functions that the host itself uses (address → reason), and an error.

    Functions for which the use cannot be found out are among them. No disk is opened, because a program that mounts it
    at that moment would find it busy. If the use cannot be found out for any function, the error is the reason and
    there are no functions; otherwise the error is ''. Raises no DriverError.
    """
    try:
        functions = machine.pci_functions()
        return await run_in_thread(lambda: find_functions_used_by_host(machine, functions, open_disks=False)), ""
    except DriverError as error:
        return {}, str(error)


async def gather_drivers(drivers: Sequence[DriverProcess], enabled: Sequence[str]) -> tuple[DriverFacts, ...]:
    """Ask all drivers, in parallel, what they would offer; return the facts in the order of `drivers`.

    `enabled` has the names of the enabled drivers, in the order that decides who gets a device that several of them
    claim, as in the agent. Reports of drivers that are not enabled are not changed. A driver that fails has the error
    in its report. The caller must close the drivers' processes.
    """
    answers = await asyncio.gather(*(_ask_driver(driver) for driver in drivers))
    reports = {report.driver: report for report, _ in answers}
    settled = {one.driver: one for one in resolve_conflicts([reports[name] for name in enabled if name in reports])}
    return tuple(
        DriverFacts(
            settled.get(driver.name, report),
            limitations,
            driver.name in settled,
            driver.manifest,
        )
        for driver, (report, limitations) in zip(drivers, answers, strict=True)
    )


async def gather_conductor(gateway: http.GatewayEndpoint | None, timeout: float = CONNECT_S) -> ConductorFacts:
    """Ask the conductor for a challenge, as an agent does before it connects. The challenge is not answered.

    `gateway` is None if no address is known: then nothing is asked, and the facts have no address. Waits at most
    `timeout` seconds. Errors of the connection are part of the facts, not raised.
    """
    if gateway is None:
        return ConductorFacts()
    before = time.time()
    try:
        try:
            _, answered_by, headers = await http.request_challenge(gateway, http.create_tls_context(gateway), timeout)
        except ssl.SSLCertVerificationError:
            if not gateway.announcement_key:
                raise
            gateway = await http.fetch_announcements(gateway, timeout)
            before = time.time()
            _, answered_by, headers = await http.request_challenge(gateway, http.create_tls_context(gateway), timeout)
    except (http.HttpStatusError, wire.MalformedMessageError, OSError) as error:
        problem = classify_connection_error(error)
        reason = f"no answer within {timeout:g} s" if problem == "timeout" else str(error) or type(error).__name__
        return ConductorFacts(gateway.address, gateway.fingerprint, problem=problem, reason=reason)
    return ConductorFacts(
        gateway.address,
        answered_by.fingerprint,
        answered_by.ip_address,
        date=headers.get("Date", ""),
        before=before,
        after=time.time(),
    )


def classify_connection_error(error: Exception) -> ConnectionProblem:
    """Return the ConnectionProblem for an error that `http.request_challenge` raised."""
    kinds: tuple[tuple[type[Exception], ConnectionProblem], ...] = (
        (http.HttpStatusError, "status"),
        (wire.MalformedMessageError, "answer"),
        (ssl.SSLCertVerificationError, "certificate"),
        (ssl.SSLError, "tls"),
        (socket.gaierror, "name"),
        (ConnectionRefusedError, "refused"),
        (ConnectionError, "answer"),  # somebody listens, and closes the connection
        (TimeoutError, "timeout"),
    )
    return next((problem for kind, problem in kinds if isinstance(error, kind)), "unreachable")


def explain_unusable_directory(directory: Path) -> str:
    """Return why this process cannot use or create the directory; '' if it can. Nothing is created."""
    place = next(path for path in (directory, *directory.parents) if path.exists())
    if not place.is_dir():
        return f"{place} is not a directory"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} is not writable for this user"


async def _ask_driver(driver: DriverProcess) -> tuple[DriverReport, tuple[str, ...]]:
    """Return the driver's report, and the reasons why it cannot offer everything on this host.

    If the driver fails when it is asked for these reasons, its error is the reason, unless it is already in the report.
    """
    report = await driver.discover()
    try:
        return report, await driver.probe()
    except DriverError as error:
        return report, () if report.error else (str(error),)


def _is_module_installed(machine: Machine, release: str, name: str) -> bool:
    """Return whether a kernel module is installed for the kernel `release`, as a file or built into the kernel.

    Raises DriverError if a table of modules exists but cannot be read.
    """
    for table in ("modules.dep", "modules.builtin"):
        path = f"/lib/modules/{release}/{table}"
        if release and machine.exists(path) and f"/{name}.ko" in machine.read(path, MAX_TABLE):
            return True
    return False


def _is_sys_read_only(machine: Machine) -> bool:
    """Return whether /sys is mounted read-only for this process. Raises DriverError if the table of mounts cannot be
    read."""
    lines = machine.read("/proc/self/mountinfo", MAX_TABLE).splitlines()
    mounts = [line.split() for line in lines if line.split()[4:5] == ["/sys"]]
    return bool(mounts) and "ro" in mounts[-1][5].split(",")
