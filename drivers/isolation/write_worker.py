"""The worker process of `drivers.isolation.host_writer`: the only code that executes a plan's writes on the host.

It is started as `python -I -m drivers.isolation.write_worker` and first writes `{}`. Each JSON line of stdin is one
order; orders are executed one at a time. It answers `{"percent": …}` during an upload, then `{}` for success,
`{"errno": …, "at": "open"|"write", "path": …}` for an error of the kernel, or `{"busy": …}` or `{"failed": …}` with a
text. It is a process of its own because a write into /sys may hang in the kernel for ever.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from drivers.errors import DriversBaseError
from drivers.isolation.process import die_with_parent

CHUNK_BYTES = 64 * 1024
POLL_S = 0.1


class OrderFailedError(DriversBaseError):
    """An order failed; `answer` is the answer to send."""

    def __init__(self, **answer: object) -> None:
        super().__init__(answer)
        self.answer = answer


def write_attribute(path: str, value: str | bytes) -> None:
    """Write the value to an existing file in one system call, as sysfs requires.

    Raises OrderFailedError if opening, writing or closing fails, or if only a part was written.
    """
    data = value.encode() if isinstance(value, str) else value
    at = "open"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        at = "write"
        try:
            written = os.write(handle, data)
        finally:
            os.close(handle)
    except OSError as error:
        raise OrderFailedError(errno=error.errno, at=at, path=path) from None
    if written != len(data):
        raise OrderFailedError(failed=f"{path}: the kernel accepted only {written} of {len(data)} bytes")


def write_own_file(path: str, value: str) -> None:
    """Replace a file of the driver's own directory atomically; an empty value removes it, if it exists.

    The path is not checked here; `drivers.isolation.host_writer` and the agent did that before. Raises
    OrderFailedError, with the error number, if the operating system refuses the change.
    """
    if value:
        _replace_file(path, lambda new: _write_text(new, value))
    else:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise OrderFailedError(errno=error.errno, at="open", path=path) from None


def copy_image(path: str, image: str) -> None:
    """Copy the image to a file of the driver's own directory, atomically.

    Raises OrderFailedError, with the error number, if the operating system refuses the change.
    """
    _replace_file(path, lambda new: shutil.copyfile(image, new))


def upload_firmware(path: str, image: str, send_progress: Callable[..., None]) -> None:
    """Upload the image through the kernel's firmware upload class and wait until it has ended, without a time limit.

    `path` is the directory of the class device. `send_progress` is called with the percentage and the status, every
    POLL_S seconds after the data is written.

    Raises OrderFailedError if another upload runs, because the kernel does not refuse that
    (Documentation/ABI/testing/sysfs-class-firmware), if the device reports an error, or if an attribute cannot be read
    or written. Raises OSError if writing the data fails.
    """
    if (status := _read_text(f"{path}/status")) != "idle":
        raise OrderFailedError(busy=f"{path} is {status}: another upload runs")
    write_attribute(f"{path}/loading", "1")
    handle = os.open(f"{path}/data", os.O_WRONLY | os.O_CLOEXEC)
    try:
        with open(image, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                while chunk:
                    chunk = chunk[os.write(handle, chunk) :]
    finally:
        os.close(handle)
    write_attribute(f"{path}/loading", "0")
    size = max(os.path.getsize(image), 1)
    while (status := _read_text(f"{path}/status")) != "idle":
        remaining = _read_text(f"{path}/remaining_size")
        done = size - int(remaining) if remaining.isdecimal() else 0
        send_progress(percent=min(max(done * 100 // size, 0), 100), text=status)
        time.sleep(POLL_S)
    if error := _read_text(f"{path}/error"):
        raise OrderFailedError(failed=f"the device refused the image: {error}")


def _replace_file(path: str, write_content: Callable[[str], object]) -> None:
    """Replace a file atomically: `write_content` writes `path` + `.new`, which is synced and renamed.

    Missing directories are created. Raises OrderFailedError, with the error number, if the operating system refuses.
    """
    new = f"{path}.new"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        write_content(new)
        handle = os.open(new, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(new, path)
    except OSError as error:
        raise OrderFailedError(errno=error.errno, at="open", path=path) from None


def _write_text(path: str, value: str) -> None:
    """Write a new file, or overwrite an existing one, in UTF-8. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(value)


def _read_text(path: str) -> str:
    """Return the first 4096 characters of a file without surrounding white space.

    Raises OrderFailedError if that fails.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError as error:
        raise OrderFailedError(errno=error.errno, at="open", path=path) from None


def _execute_order(order: dict[str, Any], send_progress: Callable[..., None]) -> dict[str, object]:
    """Execute one order and return the answer to send: {} for success, else the error.

    `send_progress` is called during a firmware upload. Raises KeyError for an order that is unknown or incomplete.
    """
    handlers: dict[str, Callable[[], None]] = {
        "attribute": lambda: write_attribute(order["path"], order["value"]),
        "own": lambda: write_own_file(order["path"], order["value"]),
        "copy": lambda: copy_image(order["path"], order["image"]),
        "firmware": lambda: upload_firmware(order["path"], order["image"], send_progress),
    }
    try:
        handlers[order["do"]]()
    except OrderFailedError as failed:
        return failed.answer
    except OSError as error:
        return {"errno": error.errno, "at": "write", "path": error.filename or order["path"]}
    return {}


def main() -> None:
    """Execute the orders on stdin until it ends."""
    die_with_parent()

    def send_answer(**answer: object) -> None:
        """Write one answer to stdout as a line of JSON and flush it."""
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    send_answer()
    for line in sys.stdin:
        send_answer(**_execute_order(json.loads(line), send_answer))


if __name__ == "__main__":
    main()
