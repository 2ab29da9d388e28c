"""Tests of the paths that a plan may write, and of how an open device node is detected."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from drivers.errors import Denied, DriverError, Failed, Gone
from drivers.machine import Machine
from drivers.plan import Plan, Step, Write, stray, within

FUNCTION = "/sys/bus/pci/devices/0000:3b:00.0"
GLOBS = ("/sys/bus/pci/devices/*:*:*.*/sriov_numvfs", "/state/*/[a-z]*")


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        (f"{FUNCTION}/sriov_numvfs", True),
        (f"{FUNCTION}/../x:y:z.0/sriov_numvfs", False),
        (f"{FUNCTION}/sriov_numvfs/x", False),
        (f"{FUNCTION}/reset", False),
        ("/state/0/word", True),
        ("/state/0/1", False),
        ("/state/0/a/word", False),
        ("/state/word", False),
        ("/State/0/word", False),
    ],
)
def test_a_star_in_a_path_pattern_matches_no_slash(path: str, inside: bool) -> None:
    assert within(path, GLOBS) is inside
    assert not within(path, ())


def test_the_paths_of_undo_writes_are_checked_too() -> None:
    good, bad = Write("/state/0/a", "1"), Write("/sys/power/state", "mem")
    assert stray(Plan((Step("s", good, undo=(good,)),)), GLOBS) == stray(Plan(), ()) == ""
    assert stray(Plan((Step("s", good), Step("s", good, undo=(good, bad)))), GLOBS) == bad.path
    assert stray(Plan((Step("s", bad),)), GLOBS) == bad.path


@pytest.mark.parametrize(
    ("code", "is_open"), [(0, False), (errno.EBUSY, True), (errno.ENOENT, False), (errno.ENODEV, False)]
)
def test_an_exclusive_node_counts_as_open_only_when_opening_it_gives_ebusy(
    code: int, is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, kernel = tmp_path / "vfio/12", os.open
    node.parent.mkdir()
    node.touch()

    def answer(path: str, flags: int) -> int:
        assert path == str(node)
        if code:
            raise OSError(code, os.strerror(code))
        return kernel(path, flags)

    monkeypatch.setattr("os.open", answer)
    assert Machine("n", dev_root=str(tmp_path)).is_open("/dev/vfio/12") is is_open


@pytest.mark.parametrize(
    ("code", "raised"), [(errno.EBUSY, None), (errno.EPERM, Denied), (errno.ENOENT, Gone), (0, Failed)]
)
def test_a_disk_is_claimed_only_if_an_exclusive_open_gives_ebusy_and_unknown_after_any_other_error(
    code: int, raised: type[DriverError] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, kernel = tmp_path / "sda", os.open
    node.touch()

    def answer(path: str, flags: int) -> int:
        assert flags & os.O_EXCL and flags & os.O_ACCMODE == os.O_RDONLY, "it is claimed, but never for writing"
        if code:
            raise OSError(code, os.strerror(code))
        return kernel(path, flags & ~os.O_EXCL)

    monkeypatch.setattr("os.open", answer)
    machine = Machine("n", dev_root=str(tmp_path))
    if raised is None:
        assert machine.is_claimed("/dev/sda", "8:0")
    else:
        with pytest.raises(raised, match="/dev/sda"):  # with 0: a file, and not the block device 8:0
            machine.is_claimed("/dev/sda", "8:0")


@pytest.mark.parametrize(
    "ask",
    [lambda machine: machine.is_claimed("/dev/sda", "8:0"), lambda machine: machine.is_open("/dev/vfio/12")],
    ids=["disk", "node"],
)
def test_what_a_program_has_open_only_for_a_moment_does_not_count_as_used(
    ask: Callable[[Machine], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, attempts = Machine("n"), []

    def answer(path: str, flags: int) -> int:
        attempts.append(path)
        if len(attempts) == 1:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return kernel("/dev/null", flags & ~os.O_EXCL)

    kernel = os.open
    monkeypatch.setattr("os.open", answer)
    monkeypatch.setattr("drivers.machine._format_number", lambda _: "b8:0")
    assert not ask(machine)
    assert len(attempts) == 2


def test_the_open_nodes_of_this_machine_are_complete_or_the_reason_is_named() -> None:
    found = Machine("n").list_open_nodes()
    assert all(
        re.fullmatch(r"[bc]\d+:\d+|/sys/.*/resource\d.*", number) and programs
        for number, programs in found.users.items()
    )
    if os.geteuid():
        assert "CAP_SYS_PTRACE" in found.unseen


def test_a_node_that_may_not_be_opened_raises_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(Denied, match="/dev/vfio/12"):
        Machine("n", dev_root=str(tmp_path)).is_open("/dev/vfio/12")
