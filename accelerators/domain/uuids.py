"""Beginnings of uuids that people type, as ranges of uuids, which an index of uuids can find."""

from __future__ import annotations

import re
from uuid import UUID

MIN_HEX_DIGITS = 4
"""Fewest hexadecimal digits for which uuids are searched."""


def uuid_bounds(text: str) -> tuple[UUID, UUID] | None:
    """Return the first and the last uuid that begin with `text`; the same uuid twice if `text` is a complete one.

    Returns None if `text` is not the beginning of a uuid, or has fewer than MIN_HEX_DIGITS digits.
    """
    digits = text.strip().lower().replace("-", "")
    if not MIN_HEX_DIGITS <= len(digits) <= 32 or not re.fullmatch("[0-9a-f]+", digits):
        return None
    return UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
