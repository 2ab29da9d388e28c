"""Tests of the checks of `cyborg-agent check`: each is a function from gathered facts to a result."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agents.host.checking import checks
from agents.host.checking.checks import CheckResult, Status
from agents.host.checking.facts import (
    ConductorFacts,
    ConnectionProblem,
    DriverFacts,
    HostFacts,
    KernelFacts,
    RightsFacts,
    SriovCard,
)
from drivers.inventory import Backend, Deployable, Device, DriverDeclaration, DriverReport, Fault
from drivers.isolation.driver_main import Manifest
from drivers.pci.host_usage import UNKNOWN, USED

NO_IOMMU = "no IOMMU: add intel_iommu=on to the kernel's command line"
NOON = 1_700_000_000.0
NOON_TEXT = "Tue, 14 Nov 2023 22:13:20 GMT"

GPU = Device("pci:0000:01:00.0", "GPU", "10de", "1eb8", "0000:01:00.0", deployables=(Deployable("d", 2),))
KERNEL = KernelFacts("6.1.0-18-amd64", 12, "", ("vfio-pci",), True, (SriovCard("0000:02:00.0", 8, 2, "ixgbe"),))
RIGHTS = RightsFacts(0, frozenset(checks.NEEDED_CAPABILITIES), False, "/var/lib/agent", "")
CONDUCTOR = ConductorFacts("https://c:8443", "sha256:ab", "192.0.2.1", date=NOON_TEXT, before=NOON, after=NOON + 0.2)
MANIFEST = Manifest("pci_driver", writes=("/sys/bus/pci/drivers_probe",), declares=DriverDeclaration(min_kernel="3.16"))
DRIVER = DriverFacts(DriverReport("pci_driver", devices=(GPU,)), (), enabled=True, manifest=MANIFEST)
HOST_USAGE = {"0000:00:02.0": f"{USED}sda is swap space"}
GOOD = HostFacts("cmp1.example", "cmp1", "cmp1.example", KERNEL, RIGHTS, CONDUCTOR, (DRIVER,), HOST_USAGE)


def find_result(facts: HostFacts, name: str) -> CheckResult:
    (result,) = (one for one in checks.run_checks(facts) if one.name == name)
    return result


def with_kernel(**changes: object) -> HostFacts:
    return replace(GOOD, kernel=replace(KERNEL, **changes))  # type: ignore[arg-type]


def with_rights(**changes: object) -> HostFacts:
    return replace(GOOD, rights=replace(RIGHTS, **changes))  # type: ignore[arg-type]


def with_conductor(**changes: object) -> HostFacts:
    return replace(GOOD, conductor=replace(CONDUCTOR, **changes))  # type: ignore[arg-type]


def with_driver(report: DriverReport = DRIVER.report, *limitations: str, enabled: bool = True) -> HostFacts:
    return replace(GOOD, drivers=(DriverFacts(report, limitations, enabled, MANIFEST),))


def with_problem(problem: ConnectionProblem) -> HostFacts:
    return replace(GOOD, conductor=ConductorFacts("https://c:8443", "sha256:ab", problem=problem, reason="why"))


def test_on_a_good_host_every_check_is_ok_and_gives_no_advice() -> None:
    results = checks.run_checks(GOOD)
    assert {(result.status, result.advice) for result in results} == {("ok", "")}
    assert len({result.name for result in results}) == len(results) == 13
    assert not checks.has_failed(results)


NO_IOMMU_NEEDED = replace(
    with_driver(DRIVER.report, f"no guest gets a PCI function: {NO_IOMMU}"),
    kernel=replace(KERNEL, missing_iommu=NO_IOMMU),
)
BLOCKED_GPU = Device("k", "GPU", "10de", "1eb8", to_install="cannot be done: it is in a group with the disk")
PROBLEMS: list[tuple[HostFacts, str, Status, str]] = [
    (with_kernel(release="5.10.0"), "kernel", "warning", "upgrade to Linux 5.13"),
    (with_kernel(release="3.10.0-1160.el7"), "kernel", "failed", "it needs Linux 3.16 or later"),
    (with_kernel(release="unknown"), "kernel", "warning", "not understood"),
    (with_kernel(missing_iommu=NO_IOMMU), "iommu", "warning", "no enabled driver needs one"),
    (with_kernel(missing_iommu=NO_IOMMU), "iommu", "warning", "unless no PCI function goes to guests"),
    (NO_IOMMU_NEEDED, "iommu", "failed", "add intel_iommu=on to the kernel's command line"),
    (with_kernel(vfio_drivers=()), "vfio", "warning", "modprobe vfio-pci"),
    (with_kernel(vfio_drivers=(), can_load_vfio=False), "vfio", "warning", "CONFIG_VFIO_PCI"),
    (
        replace(
            with_driver(DRIVER.report, "the kernel has no driver vfio-pci"), kernel=replace(KERNEL, vfio_drivers=())
        ),
        "vfio",
        "failed",
        "modprobe vfio-pci",
    ),
    (with_kernel(sriov_cards=(SriovCard("0000:02:00.0", 8, 0, ""),)), "sriov", "warning", "pci-pf-stub"),
    (with_rights(uid=1000, capabilities=frozenset()), "permissions", "failed", "user 1000 may not write to /sys"),
    (with_rights(sys_read_only=True), "permissions", "failed", "read-only"),
    (replace(with_rights(sys_read_only=True), drivers=()), "permissions", "warning", "read-only"),
    (with_rights(capabilities=frozenset({"CAP_DAC_OVERRIDE"})), "capabilities", "warning", "serial numbers"),
    (with_rights(state_dir_problem="/var is not writable"), "state-directory", "failed", "CYBORG_AGENT_STATE_DIR"),
    (replace(GOOD, known_host="cmp2.example"), "state-directory", "failed", "belongs to the host cmp2.example"),
    (replace(GOOD, host="localhost", known_host=""), "host-name", "failed", "CYBORG_HOST_NAME"),
    (replace(GOOD, usage_error="/proc/net/route: denied"), "host-usage", "failed", "/proc/net/route: denied"),
    (
        replace(GOOD, host_usage=HOST_USAGE | {"0000:00:03.0": f"{UNKNOWN}why", "0000:00:04.0": f"{UNKNOWN}why"}),
        "host-usage",
        "warning",
        "1 PCI function is used by this host; of 2 it cannot be found out",
    ),
    (replace(GOOD, conductor=ConductorFacts()), "route", "warning", "manage.py join_token cmp1.example"),
    (with_problem("name"), "route", "failed", "DNS"),
    (with_problem("refused"), "route", "failed", "start the conductor"),
    (with_problem("timeout"), "route", "failed", "firewalls"),
    (with_problem("unreachable"), "route", "failed", "routes"),
    (with_problem("answer"), "route", "failed", "port for agents"),
    (with_problem("status"), "route", "failed", "why"),
    (with_problem("certificate"), "tls", "failed", "make a new join token; if not, find out who answers"),
    (with_conductor(problem="certificate", fingerprint=""), "tls", "failed", "certificate authority"),
    (with_problem("tls"), "tls", "failed", "https address"),
    (with_problem("refused"), "tls", "warning", "not checked"),
    (with_conductor(address="http://c:8000", fingerprint=""), "tls", "warning", "not encrypted"),
    (with_conductor(date=""), "clock", "warning", "not compared"),
    (with_conductor(before=NOON - 20, after=NOON - 19.8), "clock", "warning", "20 s or more behind"),
    (with_conductor(before=NOON + 90, after=NOON + 90.2), "clock", "failed", "88 s or more ahead of"),
    (
        with_driver(DriverReport("pci_driver", error="pci_driver: bad rules")),
        "driver:pci_driver",
        "failed",
        "bad rules",
    ),
    (
        with_driver(DriverReport("pci_driver", faults=(Fault("0000:00:02.0", "the host uses it"),))),
        "driver:pci_driver",
        "warning",
        "not offered: 0000:00:02.0: the host uses it",
    ),
    (with_driver(DRIVER.report, "no module"), "driver:pci_driver", "warning", "limited: no module"),
    (
        with_driver(DriverReport("pci_driver", devices=(BLOCKED_GPU,))),
        "driver:pci_driver",
        "warning",
        "in a group with",
    ),
    (
        with_driver(DriverReport("generic_driver", backends=(Backend("b", "pci", error="it hangs"),))),
        "driver:generic_driver",
        "warning",
        "backend b failed: it hangs",
    ),
]


@pytest.mark.parametrize(("facts", "name", "status", "says"), PROBLEMS)
def test_each_problem_is_named_with_what_to_do(facts: HostFacts, name: str, status: Status, says: str) -> None:
    result = find_result(facts, name)
    assert result.status == status
    assert says in "\n".join((result.found, *result.details, result.advice))
    for one in checks.run_checks(facts):
        assert bool(one.advice) is (one.status != "ok"), one
    assert checks.has_failed([result]) is (status == "failed")


@pytest.mark.parametrize(
    ("facts", "name", "says"),
    [
        (
            with_conductor(address="http://127.0.0.1:8000", fingerprint=""),
            "tls",
            "not needed on the loopback interface",
        ),
        (with_conductor(fingerprint=""), "tls", "valid for this host's certificate authorities"),
        (with_problem("certificate"), "route", "is reached"),
        (with_driver(DriverReport("far", error="no library"), enabled=False), "driver:far", "not enabled; no library"),
        (replace(GOOD, known_host=""), "state-directory", "/var/lib/agent"),
        (with_conductor(before=NOON + 4, after=NOON + 4.2), "clock", "at most 4.2 s"),
    ],
)
def test_what_need_not_be_mended_is_ok(facts: HostFacts, name: str, says: str) -> None:
    result = find_result(facts, name)
    assert (result.status, result.advice) == ("ok", "") and says in result.found


def test_a_driver_says_what_it_would_offer() -> None:
    result = find_result(GOOD, "driver:pci_driver")
    assert (result.found, result.details) == ("1 device, 2 units", ("offers GPU 10de:1eb8 at 0000:01:00.0, 2 units",))


def test_a_driver_that_is_not_enabled_names_its_hardware_on_this_host() -> None:
    matches = ("pci:v000010DEd*bc03*",)
    names = {"0000:01:00.0": "pci:v000010DEd00001EB8sv00sd00bc03sc02i00", "0000:02:00.0": "pci:v00008086d1bc02"}
    for enabled in (True, False):
        driver = DriverFacts(DriverReport("npu"), (), enabled, Manifest(declares=DriverDeclaration(matches)))
        facts = replace(GOOD, drivers=(driver,), kernel=replace(KERNEL, modaliases=names))
        details = "\n".join(find_result(facts, "driver:npu").details)
        assert ("hardware of it is here: 0000:01:00.0; to use it" in details) is not enabled


def test_the_true_clock_difference_is_always_within_the_bounds() -> None:
    for real_offset in (-30.0, -0.4, 0.0, 0.6, 30.0):
        for age_of_header in (0.0, 0.9, 1.9):
            sent, answered = NOON, NOON + 0.3  # on this host
            date = NOON + real_offset + 0.1 - age_of_header
            whole_seconds = checks.bound_clock_offset(_format_date(date), sent, answered)
            assert whole_seconds is not None
            assert whole_seconds[0] <= real_offset <= whole_seconds[1] + 1.0


def _format_date(seconds: float) -> str:
    from email.utils import formatdate

    return formatdate(int(seconds), usegmt=True)


def test_the_text_has_one_block_for_each_check_and_the_json_all_fields() -> None:
    results = checks.run_checks(with_problem("refused"))
    text = checks.render_text("cmp1.example", results)
    assert text.startswith("cmp1.example: 1 failed, 2 warnings\n")
    assert any(line.startswith("failed   route") for line in text.splitlines())
    assert "→ start the conductor" in text
    document = json.loads(checks.render_json("cmp1.example", results))
    assert (document["host"], document["ok"]) == ("cmp1.example", False)
    assert {"name", "status", "found", "advice", "details"} == document["checks"][0].keys()
    good = json.loads(checks.render_json("h", checks.run_checks(GOOD), GOOD.drivers))
    assert good["ok"] is True and good["manifests"]["pci_driver"]["declares"] == {"min_kernel": "3.16"}
