"""Resolve names that people type into the uuids that the API takes."""

from __future__ import annotations

import re
from uuid import UUID

import click

from cyborgweb.cli.connection import Api
from cyborgweb.cli.problems import CliError, Exit

BEGINNING = re.compile(r"[0-9a-f-]{4,36}")
LOOKED_AT = 20_000
"""The largest number of devices that is fetched to resolve the beginning of a uuid, or an address on a host."""


def device(api: Api, text: str) -> str:
    """Return the uuid of a device, given its uuid, the beginning of it (at least 4 characters), or HOST/ADDRESS.

    A whole uuid costs no request; otherwise up to LOOKED_AT devices are fetched. Raises CliError if no device or
    several devices match, UsageError if `text` has none of these forms.
    """
    try:
        return str(UUID(text))
    except ValueError:
        pass
    host, slash, address = text.rpartition("/")
    if slash:
        found = [
            row["uuid"]
            for row in api.rows("devices/", LOOKED_AT, host=host, fields="uuid,address")
            if row["address"] == address
        ]
    elif BEGINNING.fullmatch(text.lower()):
        there = [row["uuid"] for row in api.rows("devices/", LOOKED_AT, fields="uuid")]
        if len(there) == LOOKED_AT:
            raise CliError(
                Exit.REFUSED,
                f"There are too many devices to search for {text!r}: give the whole uuid, or HOST/ADDRESS.",
            )
        found = [uuid for uuid in there if uuid.startswith(text.lower())]
    else:
        raise click.UsageError(
            f"{text!r} does not name a device: give its uuid, at least the first 4 characters of it, or HOST/ADDRESS."
        )
    if len(found) > 1:
        some = ", ".join(found[:3])
        raise CliError(Exit.NOT_FOUND, f"{text!r} is not one device but {len(found)}: {some}…; give more of its uuid.")
    if not found:
        raise CliError(Exit.NOT_FOUND, f"There is no device {text!r}: `cyborg device-list` lists all devices.")
    return str(found[0])


def host(api: Api, name: str) -> str:
    """Return the uuid of the host `name`. Raises CliError if there is none."""
    for row in api.rows("hosts/", 1, name=name, fields="uuid"):
        return str(row["uuid"])
    raise CliError(
        Exit.NOT_FOUND, f"There is no host {name!r}: `cyborg agent-list` lists the hosts that have an agent."
    )
