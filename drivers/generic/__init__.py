"""The generic driver: hardware that an operator describes in the settings, with one backend for each section.

`driver.py` is the driver, which calls its backends. `backend.py` defines what a backend can do, and each kind of
backend has its own module beside it.
"""

from __future__ import annotations

from drivers.generic.driver import GenericDriver

__all__ = ["GenericDriver"]
