"""Microversions 2.0 to 2.3: which one a request asks for, and what is said about it. Pure; called by `view`."""

from __future__ import annotations

import re

Version = tuple[int, int]
OLDEST: Version = (2, 0)
NEWEST: Version = (2, 3)
HEADER = "OpenStack-API-Version"
SERVICE = "accelerator"

_NUMBER = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})", re.ASCII)


class Unsupported(ValueError):
    """No answer can be given in this version; the text is the end of the 406. `offered`: say which there are."""

    def __init__(self, text: str, offered: bool) -> None:
        super().__init__(text)
        self.offered = offered


def shown(version: Version) -> str:
    """`2.3`."""
    return f"{version[0]}.{version[1]}"


SUPPORTED = {
    "Vary": HEADER,
    "OpenStack-API-Minimum-Version": shown(OLDEST),
    "OpenStack-API-Maximum-Version": shown(NEWEST),
}


def wanted(header: str) -> Version:
    """The version a header's value asks for, the oldest if it says nothing; Unsupported otherwise (contract 1.5)."""
    if not header.strip():
        return OLDEST
    word = _ours(header)
    if word == "latest":
        return NEWEST
    if not (number := _NUMBER.fullmatch(word)):
        raise Unsupported(f"Invalid value for {HEADER} header", offered=False)
    version = (int(number[1]), int(number[2]))
    span = f"The supported version range is: [{shown(OLDEST)}, {shown(NEWEST)}]."
    if version[0] != OLDEST[0]:
        raise Unsupported(
            f"Mutually exclusive versions requested. Version {shown(version)} requested "
            f"but not supported by this service. {span}",
            offered=True,
        )
    if not OLDEST <= version <= NEWEST:
        raise Unsupported(
            f"Version {shown(version)} was requested but the minor version is not supported by this service. {span}",
            offered=True,
        )
    return version


def _ours(header: str) -> str:
    """What a comma list says for this service: `accelerator X`, or else a bare X; '' when it names others only."""
    parts = [part.lower().split() for part in header.split(",")]
    for named in parts:
        if len(named) == 2 and named[0] == SERVICE:
            return named[1]
    return next((part[0] for part in parts if len(part) == 1), "")
