"""What a driver's process may not do, enforced by the kernel: write, connect, signal others, start processes.

Called by `drivers.isolation.driver_main` before any code of a driver is loaded. Landlock refuses writes and TCP
(kernel 5.13 and later,
`Documentation/userspace-api/landlock.rst`), seccomp new processes, so that the limits of one process are the limits of
all the driver does. Where the kernel lacks one of them the driver runs all the same, and its host says so.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import platform
import resource
import struct
import sys

MEMORY = 512 * 1024 * 1024
"""Bytes of address space. CPU time is not limited: the process lives long, its parent's deadline ends a busy loop."""
OPEN_FILES = 256

PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""The same numbers on every architecture."""
VERSION, PATH_BENEATH = 1, 1

WRITE_FILE = 1 << 1
CHANGE = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Write, remove and make anything."""
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
BIND_AND_CONNECT_TCP, SIGNAL = 0b11, 1 << 1

CLONE_THREAD = 0x10000
CLONE3 = 435
NATIVE = {"x86_64": (0xC000003E, 56, (57, 58)), "aarch64": (0xC00000B7, 220, ())}
"""Machine → its audit number, clone, and the older calls fork and vfork."""


def confine() -> tuple[str, ...]:
    """Take this process' rights away, for good; returns what the kernel would not take, as sentences.

    Call it while there is one thread: the kernel confines the calling thread and what it starts.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # memory files too, which RLIMIT_AS does not count
    ctypes.util.find_library = _library
    libc = ctypes.CDLL(None, use_errno=True)
    missing = []
    for what, restrict in (("write to this host", _no_writes), ("start processes", _no_processes)):
        try:
            _did(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
            restrict(libc)
        except OSError as error:
            missing.append(f"the kernel cannot keep this driver from being able to {what}: {error.strerror}")
    return tuple(missing)


def _no_writes(libc: ctypes.CDLL) -> None:
    """Landlock, with all that the kernel's version of it knows. /dev/null alone may be written."""
    abi = _did(libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), VERSION))
    files = CHANGE | (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
    handled = struct.pack("=QQQ", files, BIND_AND_CONNECT_TCP, SIGNAL)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _did(libc.syscall(LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0))
    null = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", WRITE_FILE, null)
        _did(libc.syscall(LANDLOCK_ADD_RULE, ruleset, PATH_BENEATH, rule, 0))
        _did(libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(null)
        os.close(ruleset)


def _no_processes(libc: ctypes.CDLL) -> None:
    """Seccomp: fork in all its forms is EPERM; threads go on; clone3, whose flags a filter cannot see, is ENOSYS, which
    makes the C library take clone."""
    if platform.machine() not in NATIVE or sys.maxsize < 1 << 32:
        raise OSError(errno.ENOSYS, f"not known for {platform.machine()}")
    audit, clone, forks = NATIVE[platform.machine()]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    deny, allow = 0x00050000, 0x7FFF0000
    tests: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),  # the architecture: calls of another have other numbers
        (equal, 1, 0, audit),
        (answer, 0, 0, deny | errno.EPERM),
        (load, 0, 0, 0),  # the call's number
    ]
    for number in forks:
        tests += [(equal, 0, 1, number), (answer, 0, 0, deny | errno.EPERM)]
    tests += [
        (at_least, 0, 1, 0x40000000),  # x32, the same calls under other numbers
        (answer, 0, 0, deny | errno.EPERM),
        (equal, 0, 1, CLONE3),
        (answer, 0, 0, deny | errno.ENOSYS),
        (equal, 0, 3, clone),
        (load, 0, 0, 16),  # its first argument
        (any_bit, 1, 0, CLONE_THREAD),
        (answer, 0, 0, deny | errno.EPERM),
        (answer, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *test) for test in tests))
    program = struct.pack("@HP", len(tests), ctypes.addressof(code))
    _did(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def _library(name: str) -> str | None:
    """In place of the standard library's, with which pyudev looks for libudev: that one starts ldconfig and gcc."""
    soname = f"lib{name}.so.1"
    try:
        ctypes.CDLL(soname)
    except OSError:
        return None
    return soname


def _did(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
