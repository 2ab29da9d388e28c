"""The checks of `cyborg-agent check`. A check is a function without side effects: it takes the gathered facts and
returns a CheckResult."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from agents.host.checking.facts import ConnectionProblem, DriverFacts, HostFacts
from drivers.isolation.driver_main import Manifest, explain_old_kernel, parse_kernel_version
from drivers.pci.host_usage import UNKNOWN

Status = Literal["ok", "warning", "failed"]

LANDLOCK_KERNEL = (5, 13)
"""The first kernel with Landlock, which keeps drivers from writing to the host (`drivers.isolation.sandbox`)."""
NEEDED_CAPABILITIES = {
    "CAP_DAC_OVERRIDE": "to write to /sys and to open the device nodes of guests",
    "CAP_SYS_PTRACE": "to see what programs of the host use; without it, functions that have a driver are not offered",
    "CAP_SYS_ADMIN": "to read the serial numbers of cards; without it a card is known by its PCI address only",
}
"""Capabilities that the agent needs: name → what the agent needs it for."""
MAX_GOOD_OFFSET_S, MAX_OFFSET_S = 5.0, 60.0
"""Seconds by which this host's clock and the conductor's may differ: above the first number there is a warning, above
the second the check fails."""
DATE_HEADER_S = 2.0
"""Maximum age in seconds of an answer's Date header: it has whole seconds, and servers renew it once a second."""
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
"""Host names of an address for which the connection need not be encrypted."""
ROUTE_ADVICE: dict[ConnectionProblem, str] = {
    "name": "correct the name in the join token (`join_token HOST --address …`), or this host's DNS",
    "refused": "start the conductor, open its port (CYBORG_AGENT_LISTEN), or make a join token with --address",
    "timeout": "open the way to this address and port: routes, firewalls, security groups",
    "unreachable": "correct this host's routes, or make a join token with an --address that it reaches",
    "answer": "make a join token with the --address of the conductor's own port for agents",
    "status": "the reason is the conductor's; mend it there, then check again",
}
"""Advice to the operator for each problem that `check_route` reports."""
TLS_ADVICE: dict[ConnectionProblem, str] = {
    "certificate": "if you changed the conductor's certificate, make a new join token; if not, find out who answers",
    "tls": "use an https address with TLS 1.2 or later on both sides: make a join token with the right --address",
}
"""Advice to the operator for each problem that `check_tls` reports."""
UNPINNED_ADVICE = "make a join token that pins the certificate, or install its certificate authority on this host"
"""Advice to the operator if the conductor's certificate is not valid and the join token does not pin it."""


class CheckResult(Struct, frozen=True):
    """The result of one check.

    `found` describes the finding in one line, and `details` adds further lines. `advice` tells the operator what to do;
    it is '' if there is nothing to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    details: tuple[str, ...] = ()


def run_checks(facts: HostFacts) -> tuple[CheckResult, ...]:
    """Return the results of CHECKS, in this order, followed by one result for each installed driver."""
    results = [check(facts) for check in CHECKS]
    return (*results, *(check_driver(driver, facts.kernel.modaliases) for driver in facts.drivers))


def check_kernel(facts: HostFacts) -> CheckResult:
    """Judge whether the kernel is new enough.

    `failed` if it is too old for an enabled driver; `warning` if it is too old for Landlock (LANDLOCK_KERNEL), which
    confines drivers, or if its version is not understood.
    """
    release = facts.kernel.release
    version = parse_kernel_version(release)
    for driver in facts.drivers:
        if driver.enabled and (reason := explain_old_kernel(driver.manifest.declares.min_kernel, release)):
            return CheckResult(
                "kernel", "failed", f"{driver.name}: {reason}", "upgrade the kernel, or use another driver"
            )
    if version is None:
        return CheckResult("kernel", "warning", f"its version {release!r} is not understood", "use a Linux kernel")
    if version < LANDLOCK_KERNEL:
        advice = "upgrade to Linux 5.13 or later: older kernels cannot keep drivers from writing to this host"
        return CheckResult("kernel", "warning", release, advice)
    return CheckResult("kernel", "ok", release)


def check_iommu(facts: HostFacts) -> CheckResult:
    """Judge whether the kernel uses an IOMMU. If not, the result is `failed` if an enabled driver says that it needs
    one, otherwise `warning`."""
    kernel = facts.kernel
    if not kernel.missing_iommu:
        return CheckResult("iommu", "ok", f"{_count(kernel.iommu_groups, 'IOMMU group')}")
    found, _, advice = kernel.missing_iommu.partition(": ")
    names = _list_drivers_lacking(facts, kernel.missing_iommu)
    needed = (
        f", which {' and '.join(names)} need{'s' if len(names) == 1 else ''}"
        if names
        else "; no enabled driver needs one"
    )
    advice = advice or "switch it on"
    if names:
        return CheckResult("iommu", "failed", found + needed, advice)
    return CheckResult("iommu", "warning", found + needed, f"{advice}, unless no PCI function goes to guests")


def check_vfio(facts: HostFacts) -> CheckResult:
    """Judge whether functions can be given to guests: the kernel has loaded the module vfio-pci, or a variant of it.

    If not, the result is `failed` if an enabled driver says that it needs vfio-pci, otherwise `warning`.
    """
    kernel, advice = facts.kernel, "load it now (modprobe vfio-pci) and at every boot (/etc/modules-load.d)"
    if kernel.vfio_drivers:
        return CheckResult("vfio", "ok", f"loaded: {', '.join(kernel.vfio_drivers)}")
    names = _list_drivers_lacking(facts, "driver vfio-pci")
    status: Status = "failed" if names else "warning"
    if kernel.can_load_vfio:
        return CheckResult("vfio", status, "vfio-pci is not loaded", advice)
    return CheckResult(
        "vfio",
        status,
        f"the kernel {kernel.release} has no module vfio-pci",
        "install the kernel's modules, or boot a kernel with CONFIG_VFIO_PCI, unless no PCI function goes to guests",
    )


def check_sriov(facts: HostFacts) -> CheckResult:
    """Show the cards that can have virtual functions; `warning` if one of them has no kernel driver."""
    cards = facts.kernel.sriov_cards
    details = tuple(
        f"{card.address}: {card.current} of at most {card.total}, driver {card.driver or 'none'}" for card in cards
    )
    unable = [card.address for card in cards if not card.driver]
    if unable:
        advice = "bind the card's own kernel driver (or pci-pf-stub) before its rule asks for virtual functions"
        return CheckResult("sriov", "warning", f"{', '.join(unable)} has no kernel driver", advice, details)
    count = _count(len(cards), "card")
    return CheckResult("sriov", "ok", f"{count} can have virtual functions", details=details)


def check_permissions(facts: HostFacts) -> CheckResult:
    """Judge whether the user that runs this check may write to /sys.

    If not, the result is `failed` if an enabled driver may have steps that write there, otherwise `warning`.
    """
    rights = facts.rights
    user = "root" if rights.uid == 0 else f"user {rights.uid}"
    writers = [driver.name for driver in facts.drivers if driver.enabled and _writes_sys(driver)]
    status: Status = "failed" if writers else "warning"
    if rights.sys_read_only:
        advice = "remount /sys writable for the agent: no ProtectKernelTunables=, no read-only container"
        return CheckResult("permissions", status, "/sys is mounted read-only here", advice)
    if rights.uid != 0 and "CAP_DAC_OVERRIDE" not in rights.capabilities:
        advice = "run the agent, and this check, as root with the capabilities of the systemd unit"
        return CheckResult("permissions", status, f"{user} may not write to /sys", advice)
    return CheckResult("permissions", "ok", f"{user} may write to /sys")


def check_capabilities(facts: HostFacts) -> CheckResult:
    """Judge whether this process has NEEDED_CAPABILITIES, which the agent's systemd unit has; `warning` if one is
    missing."""
    missing = [name for name in NEEDED_CAPABILITIES if name not in facts.rights.capabilities]
    if not missing:
        return CheckResult("capabilities", "ok", ", ".join(NEEDED_CAPABILITIES))
    details = tuple(f"{name}: {NEEDED_CAPABILITIES[name]}" for name in missing)
    advice = "run the agent, and this check, as root with the capabilities of the systemd unit"
    return CheckResult("capabilities", "warning", f"without {' and '.join(missing)}", advice, details)


def check_state_directory(facts: HostFacts) -> CheckResult:
    """Judge whether the agent can keep its key and its journal in the state directory.

    `failed` if this process cannot use or create the directory, or if the journal there belongs to another host.
    """
    rights = facts.rights
    if rights.state_dir_problem:
        advice = "correct CYBORG_AGENT_STATE_DIR, or the owner of this directory"
        return CheckResult("state-directory", "failed", f"{rights.state_dir}: {rights.state_dir_problem}", advice)
    if facts.known_host not in ("", facts.host):
        return CheckResult(
            "state-directory",
            "failed",
            f"{rights.state_dir} belongs to the host {facts.known_host}, this one is {facts.host}",
            "give each host its own CYBORG_AGENT_STATE_DIR, or move that directory away and join again",
        )
    return CheckResult("state-directory", "ok", rights.state_dir)


def check_host_name(facts: HostFacts) -> CheckResult:
    """Show the names of the host: the name of its compute provider in Placement, and its node name.

    `failed` if the first name is empty or contains "localhost". Only the operator can compare it with Placement.
    """
    found = f"{facts.host} (compute provider in Placement), {facts.node} (node)"
    if not facts.host or "localhost" in facts.host:
        advice = "set CYBORG_HOST_NAME to the name of this host's compute provider in Placement"
        return CheckResult("host-name", "failed", found, advice)
    return CheckResult("host-name", "ok", found)


def check_host_usage(facts: HostFacts) -> CheckResult:
    """Show the PCI functions that the host itself uses, which are never offered.

    `warning` if the use of a function cannot be found out, which is not offered either; `failed` if nothing can be
    found out.
    """
    if facts.usage_error:
        return CheckResult(
            "host-usage",
            "failed",
            f"it cannot be found out what this host itself uses: {facts.usage_error}",
            "let the agent read the host's own /proc and /sys: until then no PCI function is offered",
        )
    details = tuple(f"{address}: {reason}" for address, reason in sorted(facts.host_usage.items()))
    used = sum(not reason.startswith(UNKNOWN) for reason in facts.host_usage.values())
    found = f"{_count(used, 'PCI function')} {'is' if used == 1 else 'are'} used by this host"
    if unknown := len(details) - used:
        advice = "see the lines above: what is unknown is not offered"
        return CheckResult("host-usage", "warning", f"{found}; of {unknown} it cannot be found out", advice, details)
    return CheckResult("host-usage", "ok", found, details=details)


def check_route(facts: HostFacts) -> CheckResult:
    """Judge whether the conductor answers; `failed` if it does not, `warning` if there is no address to ask.

    A problem with TLS shows that the conductor is reached: the result is `ok`, and `check_tls` reports the problem.
    """
    conductor = facts.conductor
    if not conductor.address:
        advice = f"set CYBORG_JOIN_TOKEN to the line that `manage.py join_token {facts.host}` prints on the conductor"
        return CheckResult("route", "warning", "there is no join token, so the conductor was not asked", advice)
    if advice := ROUTE_ADVICE.get(conductor.problem, ""):
        return CheckResult("route", "failed", f"{conductor.address}: {conductor.reason}", advice)
    if conductor.problem:
        return CheckResult("route", "ok", f"{conductor.address} is reached, but see tls")
    seconds = conductor.after - conductor.before
    return CheckResult("route", "ok", f"{conductor.address} ({conductor.ip_address}) answers in {seconds:.2f} s")


def check_tls(facts: HostFacts) -> CheckResult:
    """Judge whether the connection is encrypted, and whether the conductor has the certificate that the join token
    pins, or one that was announced since.

    `failed` for a TLS error or another certificate; `warning` if the conductor was not reached, or if the connection is
    not encrypted and its address is no loopback address.
    """
    conductor = facts.conductor
    if advice := TLS_ADVICE.get(conductor.problem, ""):
        unpinned = conductor.problem == "certificate" and not conductor.fingerprint
        return CheckResult("tls", "failed", conductor.reason, UNPINNED_ADVICE if unpinned else advice)
    if not conductor.address or conductor.problem:
        return CheckResult("tls", "warning", "not checked, because the conductor was not reached", "see route")
    if conductor.fingerprint:
        return CheckResult("tls", "ok", f"this host accepts the certificate, {conductor.fingerprint}")
    if conductor.address.startswith("https:"):
        return CheckResult("tls", "ok", "the certificate is valid for this host's certificate authorities")
    if urlsplit(conductor.address).hostname in LOOPBACK_HOSTS:
        return CheckResult("tls", "ok", "not needed on the loopback interface")
    advice = "set CYBORG_AGENT_LISTEN on the conductor and make a join token with its https address"
    return CheckResult("tls", "warning", "the connection is not encrypted", advice)


def check_clock(facts: HostFacts) -> CheckResult:
    """Judge by how much this host's clock and the conductor's differ at least.

    `warning` above MAX_GOOD_OFFSET_S seconds, or if the conductor gave no date; `failed` above MAX_OFFSET_S seconds.
    """
    conductor = facts.conductor
    offset = bound_clock_offset(conductor.date, conductor.before, conductor.after)
    if offset is None:
        return CheckResult("clock", "warning", "not compared, because the conductor gave no date", "see route")
    lowest, highest = offset
    at_least, at_most = max(lowest, -highest, 0.0), max(abs(lowest), abs(highest))
    found = f"it differs from the conductor's by at most {at_most:.1f} s"
    if at_least <= MAX_GOOD_OFFSET_S:
        return CheckResult("clock", "ok", found)
    found = f"this host is {at_least:.0f} s or more {'behind' if lowest > 0 else 'ahead of'} the conductor"
    status: Status = "failed" if at_least > MAX_OFFSET_S else "warning"
    return CheckResult("clock", status, found, "synchronize both clocks, for example with chrony or systemd-timesyncd")


def check_driver(driver: DriverFacts, modaliases: Mapping[str, str]) -> CheckResult:
    """Judge what a driver would offer, and name everything that it would not offer, with the reason.

    `modaliases` (PCI address → modalias) tells which hardware of a driver that is not enabled is on this host.
    """
    report, name = driver.report, f"driver:{driver.name}"
    prefix = "" if driver.enabled else "not enabled; "
    if report.error:
        status: Status = "failed" if driver.enabled else "ok"
        advice = "correct CYBORG_DRIVER_SETTINGS or what the reason names" if driver.enabled else ""
        return CheckResult(name, status, f"{prefix}{report.error.removeprefix(f'{driver.name}: ')}", advice)
    units = sum(part.num_accelerators for device in report.devices for part in device.deployables)
    found = f"{prefix}{_count(len(report.devices), 'device')}, {_count(units, 'unit')}"
    details = (*_describe_driver(driver), *_describe_unused_hardware(driver, modaliases))
    if not driver.enabled or not (report.faults or driver.limitations or _list_unhealthy(driver)):
        return CheckResult(name, "ok", found, details=details)
    advice = "read the lines above: they name what is left out or limited, and why; change the hardware or the rules"
    return CheckResult(name, "warning", found, advice, details)


CHECKS: tuple[Callable[[HostFacts], CheckResult], ...] = (
    check_kernel,
    check_iommu,
    check_vfio,
    check_sriov,
    check_permissions,
    check_capabilities,
    check_state_directory,
    check_host_name,
    check_host_usage,
    check_route,
    check_tls,
    check_clock,
)
"""The checks of the host, in the order in which their results are shown."""


def bound_clock_offset(date: str, before: float, after: float) -> tuple[float, float] | None:
    """Return the least and the greatest possible difference between the conductor's clock and this host's, in seconds.

    `date` is the Date header of the conductor's answer. `before` and `after` are this host's time before and after the
    request, in seconds since 1970. A positive difference means that this host is behind. Returns None if `date` is not
    a valid date.
    """
    try:
        server = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return server - after, server + DATE_HEADER_S - before


def render_text(host: str, results: Sequence[CheckResult]) -> str:
    """Return the results as text for a terminal: one line for each check, and below it the details and the advice."""
    statuses = [result.status for result in results]
    width = max(len(result.name) for result in results)
    lines = [f"{host}: {statuses.count('failed')} failed, {_count(statuses.count('warning'), 'warning')}", ""]
    for result in results:
        lines.append(f"{result.status:<8} {result.name:<{width}}  {result.found}")
        lines += [f"{'':{width + 11}}{text}" for detail in result.details for text in detail.splitlines()]
        lines += [f"{'':{width + 11}}→ {result.advice}"] if result.advice else []
    return "\n".join(lines) + "\n"


def render_json(host: str, results: Sequence[CheckResult], drivers: Sequence[DriverFacts] = ()) -> str:
    """Return the results as one JSON document.

    Its keys are `host`, `ok` (true if no check failed), `checks` (the results) and `manifests` (by driver name).
    """
    manifests: dict[str, Manifest] = {driver.name: driver.manifest for driver in drivers}
    document = {"host": host, "ok": not has_failed(results), "checks": results, "manifests": manifests}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def has_failed(results: Sequence[CheckResult]) -> bool:
    """Return whether a check failed; warnings do not count."""
    return any(result.status == "failed" for result in results)


def _describe_driver(driver: DriverFacts) -> Iterator[str]:
    """Yield one line for each device, fault, failed backend and limitation of a driver, and one more for a device that
    is to be prepared."""
    report = driver.report
    for device in report.devices:
        units = sum(part.num_accelerators for part in device.deployables)
        health = "" if device.status == "ok" else f", {device.status}: {device.status_reason}"
        place = device.address or device.key
        yield f"offers {device.type} {device.vendor}:{device.model} at {place}, {_count(units, 'unit')}{health}"
        if device.to_install:
            yield f"  to be prepared: {'; '.join(device.to_install.splitlines())}"
    yield from (f"not offered: {fault.subject}: {fault.reason}" for fault in report.faults)
    yield from (f"backend {one.name} failed: {one.error}" for one in report.backends if one.error)
    yield from (f"limited: {reason}" for reason in driver.limitations)


def _describe_unused_hardware(driver: DriverFacts, modaliases: Mapping[str, str]) -> Iterator[str]:
    """Yield a line with the PCI functions that the `matches` of a driver take, if it is not enabled and they exist."""
    globs = driver.manifest.declares.matches
    found = [address for address, name in modaliases.items() if any(fnmatchcase(name, glob) for glob in globs)]
    if found and not driver.enabled:
        yield f"hardware of it is here: {', '.join(found)}; to use it, add it to CYBORG_ENABLED_DRIVERS"


def _writes_sys(driver: DriverFacts) -> bool:
    """Return whether steps of the driver may write below /sys."""
    return any(path.startswith("/sys/") for path in driver.manifest.writes)


def _list_unhealthy(driver: DriverFacts) -> list[str]:
    """Return the keys of devices whose health is not `ok` or that cannot be prepared, and the names of failed
    backends."""
    blocked = [one.key for one in driver.report.devices if one.status != "ok" or one.to_install.startswith("cannot")]
    return blocked + [backend.name for backend in driver.report.backends if backend.error]


def _list_drivers_lacking(facts: HostFacts, text: str) -> list[str]:
    """Return the names of the enabled drivers with a limitation that contains `text`."""
    return [
        driver.name
        for driver in facts.drivers
        if driver.enabled and any(text in reason for reason in driver.limitations)
    ]


def _count(number: int, noun: str) -> str:
    """Return the number and its noun, such as "2 devices". The noun gets an s unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
