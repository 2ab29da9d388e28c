"""Tests of writes to the host: one value per write, a deadline, and an explanation for every refusal."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from drivers.errors import Busy, Denied, DriverError, Failed, Gone, Invalid, Timeout, Unsupported
from drivers.isolation.host_writer import HostWriter, _make_error
from drivers.plan import Image

UPLOAD_SLOT = "/sys/class/firmware/secure-update0"


def run_with_writer(root: Path, work: Callable[[HostWriter], Awaitable[None]]) -> None:
    async def story() -> None:
        hand = HostWriter({"/sys": str(root / "sys"), "/state": str(root / "state")})
        try:
            await work(hand)
        finally:
            await hand.close()
            assert not hand.stuck

    asyncio.run(story())


def make_attribute(root: Path, path: str, value: str = "0") -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(value)
    return file


@pytest.mark.slow
def test_a_value_is_written_to_an_existing_attribute_and_no_file_is_created_in_sys(tmp_path: Path) -> None:
    file = make_attribute(tmp_path, "/sys/a/numvfs")

    async def work(hand: HostWriter) -> None:
        await hand.write("/sys/a/numvfs", "4", 5)
        assert file.read_text() == "4"
        with pytest.raises(Gone, match="/sys/a/other: No such file"):
            await hand.write("/sys/a/other", "4", 5)
        with pytest.raises(Denied, match="/dev/sda is outside the directories"):
            await hand.write("/dev/sda", "4", 5)
        assert [path.name for path in file.parent.iterdir()] == ["numvfs"]

    run_with_writer(tmp_path, work)


@pytest.mark.slow
def test_a_definition_of_a_mediated_device_can_only_be_removed_and_nothing_else_of_etc_is_written(
    tmp_path: Path,
) -> None:
    definition = make_attribute(tmp_path, "/etc/mdevctl.d/0000:02:00.0/u1", "{}")
    other = make_attribute(tmp_path, "/etc/passwd", "root")

    async def work() -> None:
        hand = HostWriter({"/sys": str(tmp_path / "sys"), "/etc/mdevctl.d": str(tmp_path / "etc/mdevctl.d")})
        for path, value in (("/etc/mdevctl.d/0000:02:00.0/u1", "x"), ("/etc/passwd", "x"), ("/etc/passwd", "")):
            with pytest.raises(Denied):
                await hand.write(path, value, 5)
        for _ in range(2):
            await hand.write("/etc/mdevctl.d/0000:02:00.0/u1", "", 5)
        await hand.close()

    asyncio.run(work())
    assert not definition.exists() and other.read_text() == "root"


@pytest.mark.slow
def test_state_files_of_a_driver_are_created_replaced_and_removed(tmp_path: Path) -> None:
    async def work(hand: HostWriter) -> None:
        await hand.write("/state/b/0/on", "1", 5)
        await hand.write("/state/b/0/on", "two", 5)
        folder = tmp_path / "state/b/0"
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("on", "two")]
        for _ in range(2):
            await hand.write("/state/b/0/on", "", 5)
        assert list(folder.iterdir()) == []

    run_with_writer(tmp_path, work)


@pytest.mark.slow
def test_a_hanging_write_times_out_and_the_next_write_succeeds(tmp_path: Path) -> None:
    make_attribute(tmp_path, "/sys/a/mode")
    os.mkfifo(tmp_path / "sys/a/reset")  # Without a reader, opening the FIFO blocks.

    async def work(hand: HostWriter) -> None:
        with pytest.raises(
            Timeout, match=r"/sys/a/reset: the kernel did not answer within 0.3 s; the outcome is unknow"
        ):
            await hand.write("/sys/a/reset", "1", 0.3)
        assert not hand.stuck
        await hand.write("/sys/a/mode", "1", 5)
        assert hand._pipe is not None
        os.kill(hand._pipe.pid, signal.SIGSTOP)
        with pytest.raises(Timeout):
            await hand.write("/sys/a/mode", "2", 0.1)
        await hand.write("/sys/a/mode", "3", 5)

    run_with_writer(tmp_path, work)


@pytest.mark.slow
def test_a_write_whose_worker_is_killed_raises_a_timeout(tmp_path: Path) -> None:
    make_attribute(tmp_path, "/sys/mode")
    os.mkfifo(tmp_path / "sys/wait")

    async def work(hand: HostWriter) -> None:
        await hand.write("/sys/mode", "1", 10)
        assert hand._pipe is not None
        asked = asyncio.ensure_future(hand.write("/sys/wait", "1", 10))
        await asyncio.sleep(0.01)
        os.kill(hand._pipe.pid, signal.SIGKILL)
        with pytest.raises(Timeout, match="the process that was writing it has ended"):
            await asked

    run_with_writer(tmp_path, work)


@pytest.mark.slow
def test_a_write_fails_when_its_worker_starts_but_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivers.isolation.host_writer.START_S", 0.05)

    async def story() -> None:
        hand = HostWriter({"/sys": "/nowhere"}, ("sleep", "60"))
        with pytest.raises(Failed, match="the process that writes to the host does not start: no answer"):
            async with asyncio.timeout(10):
                await hand.write("/sys/mode", "1", 10)
        assert not hand.stuck

    asyncio.run(story())


@pytest.mark.slow
def test_a_cancelled_write_ends_its_worker(tmp_path: Path) -> None:
    make_attribute(tmp_path, "/sys/mode")
    os.mkfifo(tmp_path / "sys/wait")

    async def work(hand: HostWriter) -> None:
        await hand.write("/sys/mode", "1", 10)
        assert hand._pipe is not None
        asked = asyncio.ensure_future(hand.write("/sys/wait", "1", 10))
        await asyncio.sleep(0.01)
        pid = hand._pipe.pid
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert not Path(f"/proc/{pid}").exists()

    run_with_writer(tmp_path, work)


@pytest.mark.parametrize(
    ("code", "at", "kind", "words"),
    [
        (errno.EBUSY, "write", Busy, "Device or resource busy"),
        (errno.ERANGE, "write", Invalid, "out of range"),
        (errno.ENOENT, "open", Gone, "No such file"),
        (errno.ENOENT, "write", Unsupported, "the kernel's driver of this device cannot do that"),
        (errno.EROFS, "open", Denied, "mounted read-only for this agent"),
        (errno.EACCES, "open", Denied, "run the agent as root, or with CAP_DAC_OVERRIDE"),
        (errno.EIO, "write", Failed, "Input/output error"),
    ],
)
def test_an_errno_of_the_kernel_becomes_a_driver_error_with_an_explanation(
    code: int, at: str, kind: type[DriverError], words: str
) -> None:
    problem = _make_error({"errno": code, "at": at, "path": "/somewhere"}, "/sys/x")
    assert type(problem) is kind
    assert str(problem).startswith("/sys/x: ")
    assert words in str(problem)


def make_image(root: Path, data: bytes) -> Image:
    file = root / "image"
    file.write_bytes(data)
    return Image(str(file), len(data), "0" * 64)


@pytest.mark.slow
def test_an_image_is_copied_completely_and_kept_when_the_next_copy_fails(tmp_path: Path) -> None:
    data = os.urandom(200_000)

    async def work(hand: HostWriter) -> None:
        await hand.upload("/state/b/image", "copy", make_image(tmp_path, data), 5, lambda _: None)
        assert (tmp_path / "state/b/image").read_bytes() == data
        with pytest.raises(Gone):
            await hand.upload("/state/b/image", "copy", Image("/nowhere", 1, "0" * 64), 5, lambda _: None)
        assert (tmp_path / "state/b/image").read_bytes() == data

    run_with_writer(tmp_path, work)


@pytest.mark.slow
@pytest.mark.parametrize(("error", "raised"), [("", None), ("programming:hw-error", Failed)])
def test_firmware_is_uploaded_by_the_kernels_firmware_class_with_progress_and_errors(
    tmp_path: Path, error: str, raised: type[DriverError] | None
) -> None:
    files = {name: make_attribute(tmp_path, f"{UPLOAD_SLOT}/{name}", "") for name in ("remaining_size", "error")}
    status = make_attribute(tmp_path, f"{UPLOAD_SLOT}/status", "idle")
    loading, data = (tmp_path / UPLOAD_SLOT.lstrip("/") / name for name in ("loading", "data"))
    for path in (loading, data):
        os.mkfifo(path)  # The writer waits for each read, as it does in the kernel.
    asked, done = threading.Event(), threading.Event()
    taken: list[bytes] = []

    def kernel() -> None:
        taken.append(loading.read_bytes())
        status.write_text("programming")
        taken.append(data.read_bytes())
        taken.append(loading.read_bytes())
        asked.wait(5)
        files["remaining_size"].write_text("50")
        done.wait(5)
        files["error"].write_text(error)
        status.write_text("idle")

    async def work(hand: HostWriter) -> None:
        thread = threading.Thread(target=kernel, daemon=True)
        thread.start()
        told: list[int] = []

        def progress(percent: int) -> None:
            told.append(percent)
            asked.set()
            if percent == 50:
                done.set()

        try:
            await hand.upload(UPLOAD_SLOT, "firmware", make_image(tmp_path, b"x" * 100), 10, progress)
            assert raised is None
        except DriverError as problem:
            assert raised is not None
            assert isinstance(problem, raised)
            assert error in str(problem)
        thread.join(5)
        assert (told[0], told[-1]) == (0, 50), "without a number in remaining_size nothing is known to be done"
        assert taken == [b"1", b"x" * 100, b"0"]

    run_with_writer(tmp_path, work)


@pytest.mark.slow
def test_a_second_upload_is_refused_while_one_runs(tmp_path: Path) -> None:
    make_attribute(tmp_path, f"{UPLOAD_SLOT}/status", "programming")
    loading = make_attribute(tmp_path, f"{UPLOAD_SLOT}/loading", "0")

    async def work(hand: HostWriter) -> None:
        with pytest.raises(Busy, match="is programming: another upload runs"):
            await hand.upload(UPLOAD_SLOT, "firmware", make_image(tmp_path, b"x"), 5, lambda _: None)
        assert loading.read_text() == "0"

    run_with_writer(tmp_path, work)
