"""Make join tokens for people, in the console, the API and on the command line, and withdraw them."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from accelerators import conductor
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from agents import authentication
from agents.host.settings import AgentSettings, determine_host_names
from agents.models import JoinToken
from drivers.configuration import ConfigurationError, load_configuration

DEFAULT_HOURS, MAX_HOURS = 24, 24 * 365
MAX_HOST_NAME = 255


@dataclass(frozen=True)
class IssuedToken:
    """A new join token: its row, the join string with its secret, the conductor's address and the pinned certificate.

    The secret is stored nowhere, so `join_string` can be shown only once. `fingerprint` is '' if nothing is pinned.
    """

    row: JoinToken
    join_string: str
    address: str
    fingerprint: str


def issue_join_token(
    host: str, requested_address: str, unpinned: bool, hours: int, by: str, source: EventSource
) -> IssuedToken:
    """Make a join token for a host, with an event.

    `requested_address` is where the agent reaches the conductor, '' for the configured address. Raises RefusedError:
    INVALID for a wrong host name, address or duration, and if the configured address is not usable; CONFLICT while the
    host is being removed.
    """
    if not 0 < len(host) <= MAX_HOST_NAME or "\0" in host:
        raise RefusedError(RefusalReason.INVALID, f"the name of a host must have 1 to {MAX_HOST_NAME} characters")
    if requested_address and not requested_address.startswith(("http://", "https://")):
        raise RefusedError(RefusalReason.INVALID, "the address must begin with http:// or https://")
    if not 0 < hours <= MAX_HOURS:
        raise RefusedError(RefusalReason.INVALID, f"a join token is valid for 1 to {MAX_HOURS} hours")
    try:
        address, fingerprint = authentication.CONDUCTOR_ADDRESS.only()(requested_address, unpinned)
        if not requested_address and _is_loopback(address) and not _is_this_machine(host):
            raise ConfigurationError(
                f"{host} cannot reach the only address that is configured here, {address}: set CYBORG_AGENT_LISTEN to"
                " an address that other machines reach"
            )
    except ConfigurationError as error:
        raise RefusedError(
            RefusalReason.INVALID,
            f"{error}; or give the address at which agents reach the conductor: --address https://NAME:PORT",
        ) from None
    join_string = authentication.create_join_token(
        host, address=address, hours=hours, created_by=by, fingerprint=fingerprint, source=source
    )
    return IssuedToken(authentication.find_join_token(join_string), join_string, address, fingerprint)


def withdraw_join_token(token: JoinToken, by: str, source: EventSource) -> None:
    """Delete a join token, with an event. An agent that has joined with it stays enrolled."""
    with conductor.writing():
        changes = {"join token": ["used" if token.used_at else "not used", None]}
        conductor.record_event("agent.uninvited", source, by, host_name=token.host_name, changes=changes)
        token.delete()


def _is_loopback(address: str) -> bool:
    """Return whether only this machine can reach this URL."""
    name = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _is_this_machine(host: str) -> bool:
    """Return whether `host` is the name of this machine, as its own agent or the operating system knows it.

    Raises ConfigurationError if the settings for an agent of this machine are not usable.
    """
    names = determine_host_names(load_configuration(AgentSettings, os.environ), None)
    return host in (*names, socket.getfqdn(), socket.gethostname(), "localhost")
