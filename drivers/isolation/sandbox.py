"""Restrict a driver's process by kernel means: it cannot write, use TCP, signal other processes or start processes.

The restrictions must be applied before any code of a driver is loaded. Landlock (kernel 5.13 and later,
`Documentation/userspace-api/landlock.rst`) refuses writes, and with newer versions TCP and signals. Seccomp refuses new
processes, so the limits of one process are the limits of everything the driver does. If the kernel lacks one of them,
the driver runs without it, and `confine` returns that as a reason, which the host reports.
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

MAX_MEMORY = 512 * 1024 * 1024
"""Maximum address space in bytes. CPU time is not limited, because the process runs for a long time; its parent's
deadline ends a busy loop."""
MAX_OPEN_FILES = 256

PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""Numbers of the Landlock system calls; they are the same on every architecture."""
GET_VERSION, PATH_BENEATH = 1, 1

WRITE_FILE = 1 << 1
CHANGE_FILES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Landlock rights to write files, and to remove and create files and directories of any kind."""
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
BIND_AND_CONNECT_TCP, SIGNAL = 0b11, 1 << 1

CLONE_THREAD = 0x10000
CLONE3 = 435
SYSCALL_NUMBERS = {"x86_64": (0xC000003E, 56, (57, 58)), "aarch64": (0xC00000B7, 220, ())}
"""Machine → its audit architecture number, the number of clone, and the numbers of the older calls fork and vfork."""


def confine() -> tuple[str, ...]:
    """Restrict this process permanently; return a sentence for each restriction that the kernel does not support.

    It also sets limits for memory, open files, core dumps and file size, and replaces `ctypes.util.find_library` by a
    version that starts no processes. Call it while the process has one thread: the kernel restricts only the calling
    thread and the threads it starts later.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # also limits memory files, which RLIMIT_AS does not count
    ctypes.util.find_library = _find_library
    libc = ctypes.CDLL(None, use_errno=True)
    missing = []
    for action, restrict in (("writing to this host", _forbid_writes), ("starting processes", _forbid_new_processes)):
        try:
            _raise_on_error(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
            restrict(libc)
        except OSError as error:
            missing.append(f"the kernel cannot prevent this driver from {action}: {error.strerror}")
    return tuple(missing)


def _forbid_writes(libc: ctypes.CDLL) -> None:
    """Refuse writes with Landlock, and TCP and signals if the kernel's version supports that.

    Only /dev/null stays writable. Raises OSError if the kernel has no Landlock.
    """
    abi = _raise_on_error(libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), GET_VERSION))
    files = CHANGE_FILES | (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
    handled = struct.pack("=QQQ", files, BIND_AND_CONNECT_TCP, SIGNAL)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _raise_on_error(libc.syscall(LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0))
    null = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", WRITE_FILE, null)
        _raise_on_error(libc.syscall(LANDLOCK_ADD_RULE, ruleset, PATH_BENEATH, rule, 0))
        _raise_on_error(libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(null)
        os.close(ruleset)


def _forbid_new_processes(libc: ctypes.CDLL) -> None:
    """Refuse new processes with a seccomp filter; threads stay possible. Raises OSError if it cannot be installed.

    fork, vfork and clone without CLONE_THREAD fail with EPERM. clone3 fails with ENOSYS, because a filter cannot see
    its flags; the C library then uses clone.
    """
    if platform.machine() not in SYSCALL_NUMBERS or sys.maxsize < 1 << 32:
        raise OSError(errno.ENOSYS, f"no filter is known for {platform.machine()}")
    audit, clone, forks = SYSCALL_NUMBERS[platform.machine()]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    deny, allow = 0x00050000, 0x7FFF0000
    instructions: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),  # the architecture: other architectures have other numbers for system calls
        (equal, 1, 0, audit),
        (answer, 0, 0, deny | errno.EPERM),
        (load, 0, 0, 0),  # the number of the system call
    ]
    for number in forks:
        instructions += [(equal, 0, 1, number), (answer, 0, 0, deny | errno.EPERM)]
    instructions += [
        (at_least, 0, 1, 0x40000000),  # x32: the same system calls with other numbers
        (answer, 0, 0, deny | errno.EPERM),
        (equal, 0, 1, CLONE3),
        (answer, 0, 0, deny | errno.ENOSYS),
        (equal, 0, 3, clone),
        (load, 0, 0, 16),  # the first argument of clone: its flags
        (any_bit, 1, 0, CLONE_THREAD),
        (answer, 0, 0, deny | errno.EPERM),
        (answer, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *test) for test in instructions))
    program = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    _raise_on_error(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def _find_library(name: str) -> str | None:
    """Return the file name of a shared library, or None if it cannot be loaded.

    It replaces `ctypes.util.find_library`, which pyudev uses to find libudev, because that one starts ldconfig and gcc.
    """
    soname = f"lib{name}.so.1"
    try:
        ctypes.CDLL(soname)
    except OSError:
        return None
    return soname


def _raise_on_error(result: int) -> int:
    """Return the result of a call of the C library. Raises OSError with its error number if the result is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
