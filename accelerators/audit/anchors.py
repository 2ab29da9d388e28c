"""Read anchors: lines of seals that were kept outside the database (`manage.py verify_events --anchor`)."""

from __future__ import annotations

import re
from pathlib import Path

from accelerators.audit.verification import Anchor
from accelerators.domain.errors import AcceleratorsError

ANCHOR_LINE = re.compile(r"(\d{1,18}) ([0-9a-f]{64})(?: ([0-9a-f]{64}))?")


class AnchorFileError(AcceleratorsError):
    """A file of anchors cannot be used; the message says why."""


def read_anchors(path: Path) -> dict[int, Anchor]:
    """Read stored seals from a file; return them by their number. Empty lines are skipped.

    Raises AnchorFileError if the file cannot be read or has no seals, if a line is not a number, a hash and, unless an
    earlier release printed it, a key, or if two lines have different hashes or keys for the same seal.
    """
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise AnchorFileError(f"{path} cannot be read: {error}") from None
    anchors: dict[int, Anchor] = {}
    for line in filter(None, map(str.strip, lines)):
        match = ANCHOR_LINE.fullmatch(line)
        if match is None:
            raise AnchorFileError(f"{path}: {line[:80]!r} is not a line of `verify_events --anchor`")
        number, anchor = int(match[1]), Anchor(match[2], match[3] or "")
        if anchors.setdefault(number, anchor) != anchor:
            raise AnchorFileError(f"{path}: there are two different lines for seal {number}")
    if not anchors:
        raise AnchorFileError(f"{path} is empty: there is nothing to compare with")
    return anchors
