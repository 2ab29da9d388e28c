"""Microversions (contract section 1.5): what was asked for, what is answered. Pure; called by `views`."""

from __future__ import annotations

import re

from accelerators.api.v2.faults import V2Error, not_acceptable

Version = tuple[int, int]
MINIMUM: Version = (2, 0)
MAXIMUM: Version = (2, 3)
HEADER = "OpenStack-API-Version"
SERVICE = "accelerator"

_NUMBER = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")


def text(version: Version) -> str:
    """`(2, 3)` → `2.3`."""
    return "{}.{}".format(*version)


_RANGE = {
    "Vary": HEADER,
    "OpenStack-API-Minimum-Version": text(MINIMUM),
    "OpenStack-API-Maximum-Version": text(MAXIMUM),
}
_SUPPORTED = f"The supported version range is: [{text(MINIMUM)}, {text(MAXIMUM)}]."


def headers(version: Version) -> dict[str, str]:
    """What every answer of a handler or of policy carries."""
    return _RANGE | {HEADER: f"{SERVICE} {text(version)}"}


def requested(header: str) -> Version:
    """The version to answer in; raises RouterFault 406 for one there is not, or that cannot be read."""
    wanted = _for_us(header).lower()
    if not wanted:
        return MINIMUM
    if wanted == "latest":
        return MAXIMUM
    number = _NUMBER.fullmatch(wanted)
    if not number:
        raise not_acceptable(f"Invalid value for {HEADER} header")
    version = (int(number[1]), int(number[2]))
    if version[0] != MAXIMUM[0]:
        refusal = f"Mutually exclusive versions requested. Version {text(version)} requested but not supported"
        raise not_acceptable(f"{refusal} by this service. {_SUPPORTED}", _RANGE)
    if not MINIMUM <= version <= MAXIMUM:
        refusal = f"Version {text(version)} was requested but the minor version is not supported by this service."
        raise not_acceptable(f"{refusal} {_SUPPORTED}", _RANGE)
    return version


def below(minimal: Version) -> V2Error:
    """406 of a handler that the version asked for does not have yet (contract section 1.6)."""
    return V2Error(406, f"Request not acceptable. The minimal required API version should be {text(minimal)}")


def _for_us(header: str) -> str:
    """Our part of `compute 2.1,accelerator 2.2` (the last one counts), else the whole: a bare version is welcome."""
    for part in reversed(header.split(",")):
        service, _, version = part.strip().partition(" ")
        if service.lower() == SERVICE and version:
            return version.strip()
    return header.strip()
