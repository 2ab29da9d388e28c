"""Microversions (contract section 1.5): parse the requested version, and build the headers of the answer. Pure."""

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
    """Return a version as text: `(2, 3)` becomes `2.3`."""
    return "{}.{}".format(*version)


_RANGE = {
    "Vary": HEADER,
    "OpenStack-API-Minimum-Version": text(MINIMUM),
    "OpenStack-API-Maximum-Version": text(MAXIMUM),
}
_SUPPORTED = f"The supported version range is: [{text(MINIMUM)}, {text(MAXIMUM)}]."


def headers(version: Version) -> dict[str, str]:
    """Return the version headers of every answer of a handler or of the policy check."""
    return _RANGE | {HEADER: f"{SERVICE} {text(version)}"}


def requested(header: str) -> Version:
    """Return the version to answer in.

    Without a header this is the minimum version. Raises RouterError 406 for a version that is not supported or cannot
    be parsed.
    """
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
    """Return the error 406 for a function that the requested version does not have yet (contract section 1.6)."""
    return V2Error(406, f"Request not acceptable. The minimal required API version should be {text(minimal)}")


def _for_us(header: str) -> str:
    """Return our part of a header such as `compute 2.1,accelerator 2.2` (the last one counts). If there is none, return
    the whole header, because a bare version is accepted."""
    for part in reversed(header.split(",")):
        service, _, version = part.strip().partition(" ")
        if service.lower() == SERVICE and version:
            return version.strip()
    return header.strip()
