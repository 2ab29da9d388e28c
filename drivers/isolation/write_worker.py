"""The worker behind `drivers.isolation.host_writer`: the only code that writes to a host. Started as `python -I -m
drivers.isolation.write_worker`.

It first says `{}`, then does one thing at a time, as a JSON line of stdin says, and answers: `{"percent": …}` while it
uploads, then `{}` when it is done, `{"errno": …, "at": "open"|"write", "path": …}` as the kernel answered, or in words
`{"busy": …}` or `{"failed": …}`. A process of its own, because a write into /sys may hang in the kernel without end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from drivers.isolation.process import die_with_parent

PIECE = 64 * 1024
POLL_S = 0.1


class Refused(Exception):
    """What to answer."""

    def __init__(self, **answer: object) -> None:
        super().__init__(answer)
        self.answer = answer


def attribute(path: str, value: str | bytes) -> None:
    """One write into a file that is there, as the kernel wants it: whole, and an error of closing counts."""
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
        raise Refused(errno=error.errno, at=at, path=path) from None
    if written != len(data):
        raise Refused(failed=f"{path} took {written} of {len(data)} bytes")


def own(path: str, value: str) -> None:
    """A file of the driver's own directory, whole or not at all; no value: no file."""
    if value:
        _replace(path, lambda new: _fill(new, value))
    else:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Refused(errno=error.errno, at="open", path=path) from None


def copy(path: str, image: str) -> None:
    """The image as a file of the driver's own directory."""
    _replace(path, lambda new: shutil.copyfile(image, new))


def firmware(path: str, image: str, say: Callable[..., None]) -> None:
    """Hand the image to the kernel's firmware upload class, whose directory `path` is, and wait for its end.

    A second upload while one runs is not refused by the kernel (Documentation/ABI/testing/sysfs-class-firmware), so it
    is refused here.
    """
    if (status := _text(f"{path}/status")) != "idle":
        raise Refused(busy=f"{path} is {status}: another upload runs")
    attribute(f"{path}/loading", "1")
    handle = os.open(f"{path}/data", os.O_WRONLY | os.O_CLOEXEC)
    try:
        with open(image, "rb") as file:
            while piece := file.read(PIECE):
                while piece:
                    piece = piece[os.write(handle, piece) :]
    finally:
        os.close(handle)
    attribute(f"{path}/loading", "0")
    size = max(os.path.getsize(image), 1)
    while (status := _text(f"{path}/status")) != "idle":
        left = _text(f"{path}/remaining_size")
        done = size - int(left) if left.isdecimal() else 0
        say(percent=min(max(done * 100 // size, 0), 100), text=status)
        time.sleep(POLL_S)
    if error := _text(f"{path}/error"):
        raise Refused(failed=f"the device refused the image: {error}")


def _replace(path: str, fill: Callable[[str], object]) -> None:
    new = f"{path}.new"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fill(new)
        handle = os.open(new, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(new, path)
    except OSError as error:
        raise Refused(errno=error.errno, at="open", path=path) from None


def _fill(path: str, value: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(value)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError as error:
        raise Refused(errno=error.errno, at="open", path=path) from None


def _do(order: dict[str, Any], say: Callable[..., None]) -> dict[str, object]:
    work: dict[str, Callable[[], None]] = {
        "attribute": lambda: attribute(order["path"], order["value"]),
        "own": lambda: own(order["path"], order["value"]),
        "copy": lambda: copy(order["path"], order["image"]),
        "firmware": lambda: firmware(order["path"], order["image"], say),
    }
    try:
        work[order["do"]]()
    except Refused as refused:
        return refused.answer
    except OSError as error:
        return {"errno": error.errno, "at": "write", "path": error.filename or order["path"]}
    return {}


def main() -> None:
    """Do what stdin says until it ends."""
    die_with_parent()

    def say(**answer: object) -> None:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    say()
    for line in sys.stdin:
        say(**_do(json.loads(line), say))


if __name__ == "__main__":
    main()
