"""The base class of the exceptions of `drivers`, and the errors that drivers and `machine` raise.

All exceptions of this package, each with the module that defines it:

    DriversBaseError                    drivers.errors
      DriverError                       drivers.errors
        Invalid                         drivers.errors
        Unsupported                     drivers.errors
        Busy                            drivers.errors
        Denied                          drivers.errors
        Gone                            drivers.errors
        Failed                          drivers.errors
        Timeout                         drivers.errors
      ConfigurationError                drivers.configuration
      PipeError                         drivers.isolation.pipe
      OrderFailedError                  drivers.isolation.write_worker

The subclasses of DriverError replace errno, so that no other code has to interpret it. Their names do not end in
`Error`, because a driver's process sends them to the agent.
"""

from __future__ import annotations

import errno


class DriversBaseError(Exception):
    """Base class of all exceptions of `drivers`."""


class DriverError(DriversBaseError):
    """Base class of all driver errors; the text is a sentence for the operator that states the reason."""


class Invalid(DriverError):
    """The request or the settings are not valid; a retry cannot succeed."""


class Unsupported(DriverError):
    """This device, driver or kernel does not support the request."""


class Busy(DriverError):
    """The device is in use, is not in the state that a step expects, has no room for what is asked, or its backend has
    not answered another question yet. A later retry may succeed."""


class Denied(DriverError):
    """The process lacks a privilege."""


class Gone(DriverError):
    """The device or the attribute does not exist, or no longer exists."""


class Failed(DriverError):
    """The hardware or the kernel refused, or an error of any other kind occurred."""


class Timeout(DriverError):
    """There was no answer in time. The outcome is unknown: read the real state before any other change."""


KINDS: dict[str, type[DriverError]] = {
    kind.__name__: kind for kind in (Invalid, Unsupported, Busy, Denied, Gone, Failed, Timeout)
}
"""Error classes by the names that a driver's process sends to the agent."""

_CLASS_BY_ERRNO: dict[int, type[DriverError]] = {
    **dict.fromkeys((errno.EINVAL, errno.ERANGE), Invalid),
    **dict.fromkeys((errno.EOPNOTSUPP, errno.ENOSYS), Unsupported),
    **dict.fromkeys((errno.EBUSY, errno.EAGAIN, errno.ENOSPC, errno.EEXIST), Busy),
    **dict.fromkeys((errno.EACCES, errno.EPERM), Denied),
    **dict.fromkeys((errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTDIR), Gone),
    errno.ETIMEDOUT: Timeout,
}


def from_os(error: OSError, subject: str) -> DriverError:
    """Convert an OSError to a DriverError about `subject`, by its errno; return it, do not raise it.

    A missing sysfs attribute becomes Gone. An unknown errno becomes Failed.
    """
    kind = _CLASS_BY_ERRNO.get(error.errno or 0, Failed)
    return kind(f"{subject}: {error.strerror or error}")


def kind_of(error: BaseException) -> str:
    """Return the key in `KINDS` of the error's class or nearest base class; `Failed` for any other exception."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind in KINDS.values()), Failed.__name__)
