"""The trait that says what an FPGA was programmed with. Pure.

Called by `programming`, which writes it, and by `diff`: what an agent reports of the kind is hidden by it.
"""

from __future__ import annotations

import re

FUNCTION_ID = "CUSTOM_FPGA_FUNCTION_ID"
KEY = "trait_function"
"""The attribute that holds it."""
LONGEST = 255

_ILLEGAL = re.compile(r"[^A-Z0-9_]")


def function_trait(driver: str, function: str) -> str:
    """Upstream's name for a function of a driver's device (contract section 4.1), in characters that a trait may have:
    a dash, which Placement refuses, becomes an underscore."""
    return _ILLEGAL.sub("_", f"{FUNCTION_ID}_{driver}_{function}".upper())[:LONGEST]


def is_function(value: str) -> bool:
    """Whether a trait says what a device was programmed with."""
    return value.startswith(FUNCTION_ID)
