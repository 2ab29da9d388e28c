"""Microversions (contract section 1.5): parse the requested version, and build the headers of the answer. This module
is pure."""

from __future__ import annotations

from accelerators.api.v2.faults import V2Error, not_acceptable_error

Microversion = tuple[int, int]
MIN_VERSION: Microversion = (2, 0)
MAX_VERSION: Microversion = (2, 3)
VERSION_HEADER = "OpenStack-API-Version"
SERVICE_TYPE = "accelerator"


def format_version(version: Microversion) -> str:
    """Return a version as text: `(2, 3)` becomes `2.3`."""
    return "{}.{}".format(*version)


_RANGE_HEADERS = {
    "Vary": VERSION_HEADER,
    "OpenStack-API-Minimum-Version": format_version(MIN_VERSION),
    "OpenStack-API-Maximum-Version": format_version(MAX_VERSION),
}
_SUPPORTED_RANGE = f"The supported version range is: [{format_version(MIN_VERSION)}, {format_version(MAX_VERSION)}]."


def build_version_headers(version: Microversion) -> dict[str, str]:
    """Return the headers that name the version of an answer and the supported range of versions."""
    return _RANGE_HEADERS | {VERSION_HEADER: f"{SERVICE_TYPE} {format_version(version)}"}


def parse_requested_version(header: str) -> Microversion:
    """Return the version to answer in.

    Without a header this is the minimum version; for `latest` it is the maximum version. Raises RouterError 406 for a
    version that is not supported or cannot be parsed.
    """
    wanted = _extract_own_version(header).lower()
    if not wanted:
        return MIN_VERSION
    if wanted == "latest":
        return MAX_VERSION
    version = _parse_version(wanted)
    if version is None:
        raise not_acceptable_error(f"Invalid value for {VERSION_HEADER} header")
    if version[0] != MAX_VERSION[0]:
        refusal = (
            f"Mutually exclusive versions requested. Version {format_version(version)} requested but not supported"
        )
        raise not_acceptable_error(f"{refusal} by this service. {_SUPPORTED_RANGE}", _RANGE_HEADERS)
    if not MIN_VERSION <= version <= MAX_VERSION:
        refusal = (
            f"Version {format_version(version)} was requested but the minor version is not supported by this service."
        )
        raise not_acceptable_error(f"{refusal} {_SUPPORTED_RANGE}", _RANGE_HEADERS)
    return version


def version_too_low_error(minimum: Microversion) -> V2Error:
    """Return the error 406 for a function that the requested version does not have yet (contract section 1.6)."""
    return V2Error(406, f"Request not acceptable. The minimal required API version should be {format_version(minimum)}")


def _parse_version(text: str) -> Microversion | None:
    """Return the two numbers of a version, None if the text has another form.

    Upstream reads each number with `int`, so signs and spaces are allowed, and a negative version is one that is not
    supported.
    """
    try:
        major, minor = map(int, text.split(".", 1))
    except ValueError:
        return None
    return (major, minor) if text.isascii() else None


def _extract_own_version(header: str) -> str:
    """Return our version in a header such as `compute 2.1,accelerator 2.2` (the last one counts).

    If our service is not named, return the whole header, because a bare version is accepted.
    """
    for part in reversed(header.split(",")):
        service, _, version = part.strip().partition(" ")
        if service.lower() == SERVICE_TYPE and version:
            return version.strip()
    return header.strip()
