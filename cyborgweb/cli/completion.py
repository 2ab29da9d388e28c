"""Complete names of hosts, drivers, profiles and devices in a shell: one bounded request with a short deadline.

A completion never prints a message, because the shell would take it for a name or mix it with what the user types.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import click

from cyborgweb.cli.connection import ApiClient, HttpApiClient
from cyborgweb.cli.logins import LoginOptions
from cyborgweb.cli.output import SHORT_UUID_LENGTH

DEADLINE_S = 2.0
"""How many seconds a shell waits at most for the names, logging in included."""
MAX_NAMES = 500
"""Rows that are fetched: one page."""
MIN_UUID_DIGITS = 4
"""The smallest number of hexadecimal digits by which the service finds devices."""
Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def make_completer(
    path: str,
    field: str,
    build_query: Callable[[str], dict[str, str]] = lambda incomplete: {},
    shorten: Callable[[str, str], str] = lambda name, incomplete: name,
) -> Completer:
    """Return a function for click's `shell_complete` that offers the values of `field` in a list of the API.

    `build_query` returns the filters that select the rows for an incomplete name. Only the first MAX_NAMES rows are
    searched. `shorten` returns the text to offer for a name and the incomplete one.
    """

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        """Return the names that begin with `incomplete`, none if they cannot be fetched within DEADLINE_S."""

        def fetch(api: ApiClient) -> Iterable[str]:
            """Fetch the names, in one request."""
            page = api.get(path, fields=field, limit=MAX_NAMES, **build_query(incomplete))
            return [str(row[field]) for row in page["results"]]

        texts = dict.fromkeys(shorten(name, incomplete) for name in _fetch_within_deadline(context, fetch))
        return [text for text in texts if text.startswith(incomplete)]

    return complete


def _fetch_within_deadline(context: click.Context, fetch: Callable[[ApiClient], Iterable[str]]) -> list[str]:
    """Return what `fetch` returns, or [] if it fails or takes longer than DEADLINE_S seconds."""
    cli_context: Any = context.find_root().obj
    login = replace(cli_context.login if cli_context else LoginOptions(), timeout=DEADLINE_S)
    fetched: list[str] = []

    def run() -> None:
        """Fetch the names. An error means that there are none: a completion has no place where it could be shown."""
        try:
            fetched.extend(fetch(HttpApiClient(login)))
        except Exception:  # noqa: BLE001 - whatever a library raises would be printed into the user's command line
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return [*fetched]


def _build_uuid_query(incomplete: str) -> dict[str, str]:
    """Return the filter for devices whose uuid begins so; none if it is too short or no beginning of a uuid."""
    digits = incomplete.replace("-", "")
    is_beginning = len(digits) >= MIN_UUID_DIGITS and not set(digits.lower()) - set("0123456789abcdef")
    return {"uuid_prefix": incomplete} if is_beginning else {}


complete_hosts = make_completer("hosts/", "name", lambda incomplete: {"name_prefix": incomplete} if incomplete else {})
complete_drivers = make_completer("drivers/", "driver")
complete_profiles = make_completer("profiles/", "name")
complete_devices = make_completer(
    "devices/",
    "uuid",
    _build_uuid_query,
    lambda uuid, incomplete: uuid if len(incomplete) > SHORT_UUID_LENGTH else uuid[:SHORT_UUID_LENGTH],
)
