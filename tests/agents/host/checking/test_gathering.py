"""Tests of what `cyborg-agent check` reads: on a host made of files, and from a gateway of the test."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from pathlib import Path

import pytest

from agents.host.checking import checks, gathering
from agents.host.checking.facts import SriovCard
from agents.host.connection.http import GatewayEndpoint
from drivers.errors import Failed
from drivers.inventory import DriverReport
from drivers.isolation.runner import DriverProcess
from tests.agents.host.fake_gateway import FakeGateway
from tests.support.modelmachine import ModelMachine

CARD = "0000:01:00.0"


@pytest.fixture
def host(tmp_path: Path) -> ModelMachine:
    """Return a host with an SR-IOV disk controller in IOMMU group 7."""
    host = ModelMachine(tmp_path)
    host.load("nvme", "1b36:0010")
    host.pci(CARD, "0x1b36", "0x0010", "0x010802", group=7, vfs=4)
    host.file(host.proc / "sys/kernel/osrelease", "6.1.0-18-amd64\n")
    return host


def test_the_kernels_iommu_vfio_and_sriov_are_read(host: ModelMachine) -> None:
    host.write(f"/sys/bus/pci/devices/{CARD}/sriov_numvfs", "2")
    kernel = gathering.gather_kernel(host.machine)
    assert (kernel.release, kernel.iommu_groups, kernel.missing_iommu) == ("6.1.0-18-amd64", 3, "")
    assert (kernel.vfio_drivers, kernel.can_load_vfio) == (("vfio-pci",), False)
    assert kernel.sriov_cards == (SriovCard(CARD, 4, 2, "nvme"),)


def test_a_host_without_an_iommu_names_the_missing_setting(tmp_path: Path) -> None:
    host = ModelMachine(tmp_path)
    host.pci(CARD, "0x1b36", "0x0010", "0x010802")
    assert gathering.gather_kernel(host.machine).missing_iommu.startswith("no IOMMU: ")


@pytest.mark.parametrize(("user", "mask", "capabilities"), [(0, "280002", 3), (1000, "0", 0)])
def test_the_rights_of_the_process_are_read(
    host: ModelMachine, tmp_path: Path, user: int, mask: str, capabilities: int
) -> None:
    host.file(host.proc / "self/status", f"Uid:\t{user}\t{user}\t{user}\t{user}\nCapEff:\t{mask.zfill(16)}\n")
    host.file(host.proc / "self/mountinfo", "21 1 0:20 / /sys ro,nosuid - sysfs sysfs ro\n")
    rights = gathering.gather_rights(host.machine, tmp_path / "state")
    assert (rights.uid, len(rights.capabilities), rights.sys_read_only) == (user, capabilities, True)
    assert rights.state_dir_problem == "" and not (tmp_path / "state").exists(), "nothing is written"


def test_a_state_directory_below_a_file_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert gathering.explain_unusable_directory(tmp_path / "file/state") == f"{tmp_path}/file is not a directory"


def test_an_unreadable_table_of_mounts_is_told(host: ModelMachine) -> None:
    (host.proc / "self/mountinfo").unlink()
    usage, error = asyncio.run(gathering.gather_host_usage(host.machine))
    assert usage == {} and "mountinfo" in error


def find_problem(address: str, pin: str = "") -> str:
    """Ask a gateway at this address and return which kind of problem there is."""
    return asyncio.run(gathering.gather_conductor(GatewayEndpoint(address, pin))).problem


def test_the_conductor_answers_with_the_pinned_certificate_and_its_clock(
    certificate: tuple[ssl.SSLContext, str],
) -> None:
    async def story() -> None:
        context, fingerprint = certificate
        server = FakeGateway(fingerprint=fingerprint)
        async with server.open(context):
            conductor = await gathering.gather_conductor(server.gateway("s3cret"))
            assert (conductor.problem, conductor.ip_address) == ("", "127.0.0.1")
            offset = checks.bound_clock_offset(conductor.date, conductor.before, conductor.after)
            assert offset is not None and offset[0] <= 0 <= offset[1]
            assert not server.credentials, "nothing was signed, and the join token was not used"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("pin", "says"), [("ab" * 32, "the join token pins sha256:abab"), ("", "self-signed certificate")]
)
def test_another_certificate_than_the_pinned_one_fails_the_check_of_tls(
    certificate: tuple[ssl.SSLContext, str], pin: str, says: str
) -> None:
    async def story() -> None:
        server = FakeGateway(fingerprint=pin)
        async with server.open(certificate[0]):
            conductor = await gathering.gather_conductor(server.gateway())
            assert conductor.problem == "certificate" and says in conductor.reason
            assert server.requests == []

    asyncio.run(story())


def test_a_refusal_of_the_gateway_is_its_own_reason() -> None:
    async def story() -> None:
        async with FakeGateway(busy_answers=1).open() as server:
            conductor = await gathering.gather_conductor(server.gateway())
            assert (conductor.problem, "(503)" in conductor.reason) == ("status", True)

    asyncio.run(story())


def test_a_port_where_nobody_listens_and_an_unknown_name_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert find_problem(f"http://127.0.0.1:{port}") == "refused"
    assert find_problem("http://nowhere.invalid:1") in ("name", "timeout")


def test_without_an_address_nobody_is_asked() -> None:
    assert asyncio.run(gathering.gather_conductor(None)).address == ""


@pytest.mark.parametrize(
    ("scheme", "answer", "problem"),
    [
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "tls"),
        ("https", b"", "answer"),
        ("http", b"hello\r\n\r\n", "answer"),
        ("http", b"HTTP/1.1 200 OK\r\n\r\n<html>", "answer"),
    ],
)
def test_a_server_that_is_no_gateway_is_told(scheme: str, answer: bytes, problem: str) -> None:
    async def story() -> None:
        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        address = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            found = await gathering.gather_conductor(GatewayEndpoint(address, "ab" * 32))
        assert found.problem == problem, found

    asyncio.run(story())


def test_a_silent_server_ends_the_check_after_its_time() -> None:
    async def story() -> None:
        async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(-1)
            writer.close()

        server = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            conductor = await gathering.gather_conductor(GatewayEndpoint(f"http://127.0.0.1:{port}", ""), timeout=0.2)
        assert (conductor.problem, conductor.reason) == ("timeout", "no answer within 0.2 s")

    asyncio.run(story())


@pytest.mark.slow
def test_enabled_drivers_settle_conflicts_and_others_are_asked_alone() -> None:
    async def story() -> None:
        command = [sys.executable, "-I", "-m", "drivers.isolation.driver_main"]
        names = ("fake_driver", "pci_driver")
        drivers = [DriverProcess(name, "cmp1", {}, command=[*command, name]) for name in names]
        try:
            fake, pci = await gathering.gather_drivers(drivers, ["fake_driver"])
        finally:
            for driver in drivers:
                await driver.close()
        assert (fake.name, fake.enabled, fake.manifest.writes) == ("fake_driver", True, ("/state/*/*/*",))
        assert (pci.name, pci.enabled, pci.manifest.declares.handle_types) == ("pci_driver", False, ("PCI",))
        assert len(fake.report.devices) == 1 and pci.report.faults[0].subject == "rules"

    asyncio.run(story())


@pytest.mark.parametrize(("error", "limitations"), [("", ("it ended",)), ("it ended before", ())])
def test_a_driver_that_ends_after_its_report_is_limited(
    error: str, limitations: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def discover(driver: DriverProcess) -> DriverReport:
        return DriverReport(driver.name, error=error)

    async def probe(driver: DriverProcess) -> tuple[str, ...]:
        raise Failed("it ended")

    monkeypatch.setattr(DriverProcess, "discover", discover)
    monkeypatch.setattr(DriverProcess, "probe", probe)
    (facts,) = asyncio.run(gathering.gather_drivers([DriverProcess("fake_driver", "n", {})], ["fake_driver"]))
    assert facts.limitations == limitations and facts.report.error == error
