"""The trait that names the function an FPGA was programmed with.

After this product has programmed an FPGA, its own trait takes precedence over function traits in the agent's reports.
"""

from __future__ import annotations

import re

FUNCTION_TRAIT_PREFIX = "CUSTOM_FPGA_FUNCTION_ID"
FUNCTION_TRAIT_KEY = "trait_function"
"""The key of the deployable's attribute that holds the trait."""
MAX_TRAIT_LENGTH = 255
"""Maximum length of a trait's name in Placement; longer names are cut."""

_ILLEGAL = re.compile(r"[^A-Z0-9_]")


def build_function_trait(driver: str, function: str) -> str:
    """Return the trait for a function of a device: `CUSTOM_FPGA_FUNCTION_ID_<driver>_<function>` in upper case.

    `driver` is the driver's name, `function` the function's id or the uuid of its image. Characters that Placement does
    not allow in a trait, such as the dash, become underscores, and the trait is cut to MAX_TRAIT_LENGTH characters, so
    different functions can get the same trait. Upstream has the same names (contract section 4.1).
    """
    return _ILLEGAL.sub("_", f"{FUNCTION_TRAIT_PREFIX}_{driver}_{function}".upper())[:MAX_TRAIT_LENGTH]


def is_function_trait(value: str) -> bool:
    """Return True if a trait names the function that a device was programmed with."""
    return value.startswith(FUNCTION_TRAIT_PREFIX)
