"""Resolve names that people type into the uuids that the API takes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from uuid import UUID

import click

from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import CliError, ExitCode

UUID_BEGINNING = re.compile(r"[0-9a-f-]{4,36}")
MAX_DEVICES_FETCHED = 20_000
"""The largest number of devices that is fetched to resolve the beginning of a uuid, or an address on a host."""


def resolve_device(api: ApiClient, text: str) -> str:
    """Return the uuid of a device, given its uuid, the beginning of it (at least 4 characters), or HOST/ADDRESS.

    A whole uuid costs no request; otherwise up to MAX_DEVICES_FETCHED devices are fetched. Raises CliError if no device
    or several devices match, UsageError if `text` has none of these forms.
    """
    if uuid := _parse_uuid(text):
        return uuid
    host, slash, address = text.rpartition("/")
    if slash:
        matching_uuids = [
            row["uuid"]
            for row in api.iterate_rows("devices/", MAX_DEVICES_FETCHED, host=host, fields="uuid,address")
            if row["address"] == address
        ]
    elif UUID_BEGINNING.fullmatch(text.lower()):
        all_uuids = [row["uuid"] for row in api.iterate_rows("devices/", MAX_DEVICES_FETCHED, fields="uuid")]
        if len(all_uuids) == MAX_DEVICES_FETCHED:
            raise CliError(
                ExitCode.REFUSED,
                f"There are too many devices to search for {text!r}: give the whole uuid, or HOST/ADDRESS.",
            )
        matching_uuids = [uuid for uuid in all_uuids if uuid.startswith(text.lower())]
    else:
        raise click.UsageError(
            f"{text!r} does not name a device: give its uuid, at least the first 4 characters of it, or HOST/ADDRESS."
        )
    if len(matching_uuids) > 1:
        first_matches = ", ".join(matching_uuids[:3])
        raise CliError(
            ExitCode.NOT_FOUND,
            f"{text!r} is not one device but {len(matching_uuids)}: {first_matches}…; give more of its uuid.",
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
