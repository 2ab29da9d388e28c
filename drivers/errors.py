"""How drivers fail: one taxonomy, so that nobody else need know errno. Raised by drivers and `machine`."""

from __future__ import annotations

import errno


class DriverError(Exception):
    """Why something could not be done, as a sentence for an operator."""


class Invalid(DriverError):
    """The request or the settings make no sense: do not repeat."""


class Unsupported(DriverError):
    """This device, driver or kernel cannot do it."""


class Busy(DriverError):
    """Somebody uses it: may be repeated."""


class Denied(DriverError):
    """A privilege is missing."""


class Gone(DriverError):
    """The device or the attribute is not there (any more)."""


class Failed(DriverError):
    """The hardware or the kernel refused."""


class Timeout(DriverError):
    """No answer in time: the outcome is unknown, look before anything else."""


KINDS: dict[str, type[DriverError]] = {
    kind.__name__: kind for kind in (Invalid, Unsupported, Busy, Denied, Gone, Failed, Timeout)
}
"""By the names under which they travel from a driver's process to the agent."""

_MEANING: dict[int, type[DriverError]] = {
    **dict.fromkeys((errno.EINVAL, errno.ERANGE), Invalid),
    **dict.fromkeys((errno.EOPNOTSUPP, errno.ENOSYS), Unsupported),
    **dict.fromkeys((errno.EBUSY, errno.EAGAIN, errno.ENOSPC, errno.EEXIST), Busy),
    **dict.fromkeys((errno.EACCES, errno.EPERM), Denied),
    **dict.fromkeys((errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTDIR), Gone),
    errno.ETIMEDOUT: Timeout,
}


def from_os(error: OSError, subject: str) -> DriverError:
    """The kernel's errno in our words (a sysfs attribute that is not there is Gone); what is unknown is Failed."""
    kind = _MEANING.get(error.errno or 0, Failed)
    return kind(f"{subject}: {error.strerror or error}")


def kind_of(error: BaseException) -> str:
    """The name of the error's kind in `KINDS`; what is none of them is a failure."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind in KINDS.values()), Failed.__name__)
