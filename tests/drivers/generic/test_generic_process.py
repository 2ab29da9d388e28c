"""Tests that one backend that blocks does not affect the others, with the generic driver in its confined process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from drivers.errors import Failed
from drivers.isolation.runner import MAX_FAILURES, DriverProcess
from drivers.plan import Ask

pytestmark = pytest.mark.system


@asynccontextmanager
async def run_remote_backends(state: Path, **files: str) -> AsyncIterator[DriverProcess]:
    """Run a driver with a remote backend for each file; each backend has one device with its own name."""
    backends = {
        name: {
            "kind": "remote",
            "devices": [{"name": name, "type": "FPGA", "vendor": "10ee", "model": "U250"}],
            "status_file": f"/state/{file}",
        }
        for name, file in files.items()
    }
    driver = DriverProcess("generic_driver", "n", {"backends": backends}, state=str(state), deadline_s=6.0)
    try:
        yield driver
    finally:
        await driver.close()


def test_a_hanging_and_a_failing_backend_do_not_affect_a_third_one_and_recover(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    (tmp_path / "good").write_text('{"here": {"status": "ok"}}')
    (tmp_path / "bad").write_text("[]")

    async def story() -> None:
        async with run_remote_backends(tmp_path, stuck="never", broken="bad", here="good") as driver:
            first, again = await driver.discover(), await driver.discover()
            assert first == again and first.error == ""
            assert [(device.key, device.backend) for device in first.devices] == [("remote:here", "here")]
            errors = {backend.name: backend.error for backend in first.backends}
            assert (
                "its share of CYBORG_DRIVER_DEADLINE_S" in errors["stuck"] and "Expected `object`" in errors["broken"]
            )
            (tmp_path / "bad").write_text("{}")
            os.close(os.open(tmp_path / "never", os.O_RDWR | os.O_NONBLOCK))
            (tmp_path / "never").unlink()
            report = await driver.discover()
            while any(backend.error for backend in report.backends):
                report = await driver.discover()
            assert {device.key: device.status for device in report.devices} == {
                "remote:stuck": "unknown",
                "remote:broken": "unknown",
                "remote:here": "ok",
            }

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_bulk_health_check_over_a_hung_backend_answers_for_the_others_and_keeps_the_driver(tmp_path: Path) -> None:
    (tmp_path / "good").write_text('{"here": {"status": "ok"}}')

    async def story() -> None:
        async with run_remote_backends(tmp_path, stuck="never", here="good") as driver:
            assert {device.key for device in (await driver.discover()).devices} == {"remote:stuck", "remote:here"}
            os.mkfifo(tmp_path / "never")
            pid = driver.pid
            for _ in range(MAX_FAILURES + 1):
                with pytest.raises(Failed, match="backend stuck: it did not answer the question health"):
                    await driver.health(Ask("remote:stuck", backend="stuck"))
                assert (await driver.health(Ask("remote:here", backend="here"))).status == "ok"
            assert driver.pid == pid and not driver.is_quarantined
            report = await driver.discover()
            assert report.error == "" and [device.key for device in report.devices] == ["remote:here"]
            (fault,) = report.faults
            assert fault.subject == "backend stuck" and "is not asked again before 20" in fault.reason
            os.close(os.open(tmp_path / "never", os.O_RDWR | os.O_NONBLOCK))

    asyncio.run(asyncio.wait_for(story(), 60))
