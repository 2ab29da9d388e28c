"""Resolve names that people type into the uuids that the API takes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from uuid import UUID

import click

from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import CliError, ExitCode

UUID_BEGINNING = re.compile(r"[0-9a-f-]{4,36}")
MIN_UUID_DIGITS = 4
MAX_NAMED_MATCHES = 3
"""Largest number of devices with the same beginning of their uuid that an error message names."""


def resolve_device(api: ApiClient, text: str) -> str:
    """Return the uuid of a device, given its uuid, the beginning of it (at least 4 characters), or HOST/ADDRESS.

    A whole uuid costs no request, any other form one request that the service answers from an index. Raises CliError if
    no device or several devices match, UsageError if `text` has none of these forms.
    """
    if uuid := _parse_uuid(text):
        return uuid
    host, slash, address = text.rpartition("/")
    if slash:
        filters = {"host": host, "address": address}
    elif UUID_BEGINNING.fullmatch(text.lower()) and len(text.replace("-", "")) >= MIN_UUID_DIGITS:
        filters = {"uuid_prefix": text}
    else:
        raise click.UsageError(
            f"{text!r} does not name a device: give its uuid, at least the first 4 characters of it, or HOST/ADDRESS."
        )
    rows = list(api.iterate_rows("devices/", MAX_NAMED_MATCHES + 1, **filters, fields="uuid"))
    matching_uuids = [row["uuid"] for row in rows]
    if len(matching_uuids) > 1:
        first_matches = ", ".join(matching_uuids[:MAX_NAMED_MATCHES])
        number_text = f"more than {MAX_NAMED_MATCHES}" if len(rows) > MAX_NAMED_MATCHES else f"{len(rows)}"
        raise CliError(
            ExitCode.NOT_FOUND,
            f"{text!r} is not one device but {number_text}: {first_matches}…; give more of its uuid.",
        )
    if not matching_uuids:
        lister = api.spell_verb("device-list")
        raise CliError(ExitCode.NOT_FOUND, f"There is no device {text!r}: `{lister}` lists all devices.")
    return str(matching_uuids[0])


def resolve_devices(api: ApiClient, texts: Iterable[str]) -> list[str]:
    """Return the uuids of devices in this order, each once. For the first wrong name raises as
    `resolve_device` does.
    """
    return list(dict.fromkeys(resolve_device(api, text) for text in texts))


def resolve_uuids(api: ApiClient, texts: Iterable[str]) -> list[str]:
    """Return whole uuids in this order, each once, without a request. Raises UsageError for another text."""
    texts = [*texts]
    if wrong := next((text for text in texts if not _parse_uuid(text)), ""):
        raise click.UsageError(f"{wrong!r} is not a uuid.")
    return list(dict.fromkeys(map(_parse_uuid, texts)))


def resolve_host(api: ApiClient, name: str) -> str:
    """Return the uuid of a host, given its name or its uuid. Raises CliError if no host has the name.

    A uuid is returned without a request, so such a host need not exist.
    """
    if uuid := _parse_uuid(name):
        return uuid
    for row in api.iterate_rows("hosts/", 1, name=name, fields="uuid"):
        return str(row["uuid"])
    lister = api.spell_verb("agent-list")
    raise CliError(ExitCode.NOT_FOUND, f"There is no host {name!r}: `{lister}` lists the hosts that have an agent.")


def _parse_uuid(text: str) -> str:
    """Return the canonical form of a uuid, or "" if `text` is none."""
    try:
        return str(UUID(text))
    except ValueError:
        return ""
