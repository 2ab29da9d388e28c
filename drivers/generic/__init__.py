"""The generic driver: hardware by an operator's words alone, one backend for each section of its settings.

`driver.py` is the driver, which asks its backends; `kind.py` is what a backend can do, a file for each kind beside it.
"""

from __future__ import annotations

from drivers.generic.driver import GenericDriver

__all__ = ["GenericDriver"]
