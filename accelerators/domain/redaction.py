"""Hide the identifiers of objects that the reader of a text may not know. This module is pure.

The fault of a request is read by its project. Its text may come from an agent, a driver or Placement, and these name
whoever has the device.
"""

from __future__ import annotations

import re

HIDDEN = "[hidden]"
_IDENTIFIER = re.compile(
    r"""
    [0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}  # a uuid with dashes or underscores, whatever is around it
    | [0-9a-f]{8}[-_][0-9a-f_-]{0,27}\Z                # such a uuid that was cut at the end of the text
    | (?<![0-9a-f])(?:
      [0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}(?![0-9a-f])  # a uuid without dashes
      | [0-9a-f]{8,31}\Z                                               # such a uuid that was cut
    )
    | \binstance-[0-9a-f]{8}(?![0-9a-f])                               # the name that libvirt has for an instance
    """,
    re.IGNORECASE | re.VERBOSE,
)


def hide_foreign_ids(text: str, own: str) -> str:
    """Return the text with every identifier replaced by HIDDEN, except those that occur in `own`.

    Identifiers are uuids in any spelling and the names of guests in libvirt. `own` is any text that contains the
    identifiers that the reader knows. Names of hosts, PCI addresses and longer hexadecimal numbers, such as digests,
    stay. A hexadecimal number of 8 to 31 digits that ends the text is taken for a uuid that was cut.
    """
    known = {_normalize(found) for found in _IDENTIFIER.findall(own)}
    return _IDENTIFIER.sub(lambda match: match[0] if _normalize(match[0]) in known else HIDDEN, text)


def _normalize(identifier: str) -> str:
    """Return the identifier in one spelling."""
    return identifier.replace("-", "").replace("_", "").lower()
