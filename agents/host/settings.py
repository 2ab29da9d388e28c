"""The agent's own configuration, read once when it starts; a table in `docs/configuration.md` is generated from it.

The gateway tells the agent everything else when it connects.
"""

from __future__ import annotations

import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from agents import credentials, wire
from drivers.configuration import ConfigurationError, declare_key, load_configuration
from drivers.plan import Act

ALL_DRIVERS = "*"
"""Name of the table in `CYBORG_DRIVER_SETTINGS` whose `acts` apply to all drivers without a list of their own."""
_DRIVER_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True)
class AgentSettings:
    """One field per `CYBORG_…` key. `drivers.configuration.list_keys` lists them for the manual."""

    join_token: str = declare_key(
        "CYBORG_JOIN_TOKEN",
        "",
        "The line that `manage.py join_token HOST` printed. Not needed once this host has joined.",
        "*(absent)*",
    )
    join_token_file: str = declare_key(
        "CYBORG_JOIN_TOKEN_FILE",
        "",
        "A file that holds the same line; `CYBORG_JOIN_TOKEN` has precedence.",
        "*(absent)*",
    )
    state_dir: str = declare_key(
        "CYBORG_AGENT_STATE_DIR", "./var/agent", "The agent's key and journal. One agent per directory."
    )
    host_name: str = declare_key(
        "CYBORG_HOST_NAME",
        "",
        "The name of this host's compute provider in Placement.",
        "the join token's host, else `getfqdn()`",
    )
    host_node: str = declare_key(
        "CYBORG_HOST_NODE",
        "",
        "The name of this host in upstream's `[DEFAULT]host`; no other host may have it.",
        "`gethostname()`",
    )
    enabled_drivers: tuple[str, ...] = declare_key(
        "CYBORG_ENABLED_DRIVERS",
        ("fake_driver",),
        "Drivers to run, separated by commas. If two of them claim one PCI address, the one that had it before keeps "
        "it, otherwise the first in this list gets it. A state that `manage.py driver` sets for a driver has "
        "precedence.",
        "`fake_driver`",
    )
    driver_settings: str = declare_key(
        "CYBORG_DRIVER_SETTINGS",
        "",
        'A TOML file with one table per driver, such as `[pci_driver]` with its `rules`. `acts = ["attach", …]` in a '
        "table: only these acts are done to that driver's devices here, whatever `manage.py driver` sets. The table "
        '`["*"]` has only `acts`: they apply to every driver without a list of its own, also one installed remotely.',
        "*(absent)*",
    )
    rescan_s: float = declare_key(
        "CYBORG_RESCAN_S", 60.0, "Seconds between two searches for devices by all drivers when no uevent causes one."
    )
    uevent_debounce_ms: int = declare_key(
        "CYBORG_UEVENT_DEBOUNCE_MS", 100, "Milliseconds in which several uevents cause only one search for devices."
    )
    driver_deadline_s: float = declare_key(
        "CYBORG_DRIVER_DEADLINE_S", 20.0, "Seconds that a driver has for one answer; then its process is killed."
    )


def read_settings(environ: Mapping[str, str]) -> AgentSettings:
    """Read and check all keys, from the environment or the TOML file. Raises ConfigurationError with one sentence."""
    settings = load_configuration(AgentSettings, environ)
    for name, value, minimum in (
        ("CYBORG_RESCAN_S", settings.rescan_s, 1),
        ("CYBORG_UEVENT_DEBOUNCE_MS", settings.uevent_debounce_ms, 0),
        ("CYBORG_DRIVER_DEADLINE_S", settings.driver_deadline_s, 0.1),
    ):
        if not minimum <= value <= 86_400_000:
            raise ConfigurationError(f"{name}={value} is not usable: give {minimum} or more")
    drivers = settings.enabled_drivers
    if not 1 <= len(drivers) <= 64 or len(set(drivers)) != len(drivers):
        raise ConfigurationError("CYBORG_ENABLED_DRIVERS must name 1 to 64 drivers, and none of them twice")
    for driver in drivers:
        if not _DRIVER_NAME.fullmatch(driver):
            raise ConfigurationError(f"CYBORG_ENABLED_DRIVERS: {driver!r} cannot be a driver's name")
    return settings


def read_join_token(settings: AgentSettings) -> credentials.JoinData | None:
    """Return the join token from the variable, else from the file; None when there is none.

    A file that does not exist counts as no token. Raises ConfigurationError when the file cannot be read or the token
    is not valid.
    """
    text, source = settings.join_token, "CYBORG_JOIN_TOKEN"
    if not text and settings.join_token_file:
        source = f"CYBORG_JOIN_TOKEN_FILE={settings.join_token_file}"
        try:
            text = Path(settings.join_token_file).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None  # an operator may remove it once the host has joined
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{source} cannot be read: {error}") from None
    if not text.strip():
        return None
    try:
        join = credentials.parse_join_string(text)
    except wire.MalformedMessageError as error:
        raise ConfigurationError(f"{source}: {error}") from None
    check_gateway_address(join.address, join.fingerprint, source)
    return join


def check_gateway_address(address: str, fingerprint: str, source: str) -> None:
    """Raise ConfigurationError unless `address` is an http or https URL with a host; with a fingerprint, only https.

    `source` names the setting in the error text.
    """
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(f"{source}: the gateway's address {address!r} is not http://HOST:PORT or https://…")
    if fingerprint and not address.startswith("https:"):
        raise ConfigurationError(f"{source}: the token pins a certificate, but its address {address} is not https")


def determine_host_names(
    settings: AgentSettings, join: credentials.JoinData | None, known_name: str = ""
) -> tuple[str, str]:
    """Return (name, node) of this host.

    The name is the configured one, else the join token's, else `known_name` (the journal's), else `getfqdn()`; the node
    is the configured one, else `gethostname()`. Raises ConfigurationError when the configured name is not the token's:
    the gateway would refuse such an agent.
    """
    name = settings.host_name or (join.host if join else "") or known_name or socket.getfqdn()
    if join and name != join.host:
        raise ConfigurationError(
            f"CYBORG_HOST_NAME={name}, but the join token is for {join.host}: make a token for {name}, or unset it"
        )
    return name, settings.host_node or socket.gethostname()


def read_driver_settings(settings: AgentSettings) -> dict[str, dict[str, Any]]:
    """Return driver → settings from the file CYBORG_DRIVER_SETTINGS; a driver without a table there is not included.

    Empty when no file is configured. Raises ConfigurationError when the file cannot be read, is not TOML, or has a key
    outside of the tables.
    """
    path = settings.driver_settings
    if not path:
        return {}
    try:
        stored = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"CYBORG_DRIVER_SETTINGS={path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"CYBORG_DRIVER_SETTINGS={path} is not TOML: {error}") from None
    for name, table in stored.items():
        if not isinstance(table, dict):
            raise ConfigurationError(f"CYBORG_DRIVER_SETTINGS={path}: {name!r} is outside of a [driver] table")
    return stored


def extract_allowed_acts(driver_settings: dict[str, dict[str, Any]]) -> dict[str, frozenset[str]]:
    """Take the `acts` out of the drivers' tables and return driver → the acts that are allowed on this host.

    For a driver that is not in the result the entry ALL_DRIVERS applies, and without that entry all acts are allowed.
    Changes `driver_settings`: `acts` is removed from each table, so that only the driver's own settings are left, and
    the table ALL_DRIVERS is removed. Raises ConfigurationError when `acts` is not a list of acts, or the table
    ALL_DRIVERS has other keys.
    """
    allowed = {}
    for name, table in driver_settings.items():
        if "acts" not in table:
            continue
        acts = table.pop("acts")
        if not isinstance(acts, list) or not set(map(str, acts)) <= set(get_args(Act)):
            known = ", ".join(get_args(Act))
            raise ConfigurationError(f"CYBORG_DRIVER_SETTINGS: acts = {acts!r} of [{name}] is not a list of {known}")
        allowed[name] = frozenset(acts)
    if other_keys := driver_settings.pop(ALL_DRIVERS, {}):
        text = (
            'CYBORG_DRIVER_SETTINGS: the table ["*"] can have only acts; '
            f"move {', '.join(other_keys)} to a driver's table"
        )
        raise ConfigurationError(text)
    return allowed
