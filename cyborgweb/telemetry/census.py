"""The load census: ask hosts now how busy they are and compare it with their free units; hosts that fit come first.

It only reads: nothing is reserved for the caller, and Placement and the bind decide again. It costs a few statements
and at most two queries to the gateways, whatever the number of hosts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelerators.domain import groups
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import Host
from accelerators.requests import candidates, profiles
from accelerators.requests.candidates import ProviderCandidate
from accelerators.requests.capacity import LoadSummary
from accelerators.runtime import database_clock
from agents import telemetry
from agents.liveness import explain_absence
from agents.telemetry import LoadSnapshot
from cyborgweb.errors import CyborgwebError
from cyborgweb.telemetry import usage_with_load

MAX_HOSTS = 10_000
MAX_NAMED_HOSTS = 1_000
"""Hosts that one question can name."""
MAX_REQUEST_COUNT = groups.MAX_REQUESTS
"""Requests that one question can ask for."""
DEFAULT_WAIT_S, MAX_WAIT_S = 2.0, 10.0
MAX_CONCURRENT = 2
"""Censuses that one process runs at a time: each occupies a thread for as long as it lasts."""
_slots = threading.BoundedSemaphore(MAX_CONCURRENT)


class CensusBusyError(CyborgwebError, RefusedError):
    """This process already runs MAX_CONCURRENT censuses. `wait` is the value for Retry-After, in seconds."""

    wait = 5

    def __init__(self) -> None:
        super().__init__(
            RefusalReason.UNAVAILABLE,
            f"{MAX_CONCURRENT} censuses are under way in this process: try again in a few seconds.",
        )


@dataclass(frozen=True)
class CensusQuestion:
    """The question of a census: do `count` more requests of the device profile `profile` fit on each of the `hosts`?

    `hosts` are names, None for all hosts. `profile` is a name; '' means that any free unit is enough for one request.
    `within_s` is the longest time to wait for the hosts' answers, in seconds.
    """

    hosts: tuple[str, ...] | None = None
    profile: str = ""
    count: int = 1
    within_s: float = DEFAULT_WAIT_S


@dataclass(frozen=True)
class CensusRow:
    """One host in the result of a census.

    `free` is the number of free units that fit; `room` is how many requests the host can take, at most as many as were
    asked for. `fits` is whether it can take all of them and its agent is up or late; otherwise `why` is the reason (''
    if it fits). `load` is None if the host did not answer.
    """

    host: Host
    free: int
    room: int
    fits: bool
    why: str
    load: LoadSummary | None

    @property
    def sort_key(self) -> tuple[bool, bool, float, str]:
        """Sort key of a census: the hosts that can take all requests come first. Among them, and among the others, the
        least busy host comes first, and hosts of unknown load come last."""
        mean = self.load.mean if self.load else None
        return not self.fits, mean is None, mean or 0.0, self.host.name


@dataclass(frozen=True)
class Census:
    """The result of a census.

    `came`: how many hosts answered; `missing`: the others, with the reason, also those that were not asked because
    their agent is down, barred or has never joined, or because they are being removed; `rows`: all hosts, those that
    fit first; `took_s`: how many seconds it took; `left_out`: how many hosts there are beyond MAX_HOSTS.
    """

    came: int
    missing: list[tuple[Host, str]]
    rows: list[CensusRow]
    took_s: float
    left_out: int = 0

    @property
    def fitting(self) -> int:
        """The number of hosts that can take as many requests as were asked for."""
        return sum(row.fits for row in self.rows)


def take_census(question: CensusQuestion) -> Census:
    """Take a census; blocks for up to the question's `within_s` seconds and a little more for statements and gateways.

    Raises CensusBusyError if MAX_CONCURRENT are running, RefusedError NOT_FOUND for a host or a profile that does not
    exist, CONFLICT for a profile that asks for no accelerator.
    """
    if not _slots.acquire(blocking=False):
        raise CensusBusyError
    try:
        return _ask_hosts(question)
    finally:
        _slots.release()


def _ask_hosts(question: CensusQuestion) -> Census:
    """Do the work of `take_census`: load hosts and free units, ask the agents that can answer, and build the rows.

    Raises RefusedError as `take_census` does.
    """
    started_at = time.monotonic()
    wanted_groups = _load_profile_groups(question.profile)
    hosts, left_out = _load_hosts(question.hosts)
    absences = {host.pk: _explain_absence(host) for host in hosts}
    candidates_by_host = candidates.find_candidates_by_host(list(absences))
    asked_hosts = [key for key, absence in absences.items() if not absence]
    loads = telemetry.run_load_census(asked_hosts, question.within_s) if asked_hosts else LoadSnapshot({})
    load_by_host = _compute_load_by_host(loads)
    rows = [
        _build_row(
            host,
            absences[host.pk],
            candidates_by_host[host.pk],
            wanted_groups,
            question.count,
            load_by_host.get(host.pk),
        )
        for host in hosts
    ]
    missing = _explain_missing_hosts(
        [host for host in hosts if host.pk not in load_by_host], absences, loads, question.within_s
    )
    took = time.monotonic() - started_at
    return Census(len(load_by_host), missing, sorted(rows, key=lambda row: row.sort_key), took, left_out)


def _load_profile_groups(name: str) -> tuple[Mapping[str, str], ...] | None:
    """Return the groups of the device profile, None if no profile is named. Raises RefusedError NOT_FOUND if it does
    not exist, CONFLICT if it asks for no accelerator.
    """
    if not name:
        return None
    profile = profiles.get_profile_by_name(name)
    if profile is None:
        raise RefusedError(RefusalReason.NOT_FOUND, f"There is no device profile {name!r}.")
    if not groups.list_requested_groups(profile.groups):
        raise RefusedError(RefusalReason.CONFLICT, f"Profile {name} asks for no accelerator.")
    return profile.groups


def _load_hosts(names: tuple[str, ...] | None) -> tuple[list[Host], int]:
    """Return the hosts of these names, or the first MAX_HOSTS of all hosts for None, with their agents; and the number
    of hosts that are left out.

    Raises RefusedError NOT_FOUND for a name that does not exist.
    """
    queryset = Host.objects.select_related("agent", "lease").defer("drivers")
    if names is not None:
        hosts = list(queryset.filter(name__in=names))
        if unknown := sorted(set(names) - {host.name for host in hosts}):
            raise RefusedError(RefusalReason.NOT_FOUND, f"There is no host {', '.join(unknown)[:300]}.")
        return hosts, 0
    hosts = list(queryset[: MAX_HOSTS + 1])
    return hosts[:MAX_HOSTS], Host.objects.count() - MAX_HOSTS if len(hosts) > MAX_HOSTS else 0


def _explain_absence(host: Host) -> str:
    """Return why the host's agent cannot be asked, with what helps; '' if it can be asked."""
    absence = explain_absence(host, getattr(host, "agent", None))
    return absence.nameless_text if absence else ""


def _build_row(
    host: Host,
    absence: str,
    host_candidates: Sequence[ProviderCandidate],
    wanted_groups: Sequence[Mapping[str, str]] | None,
    count: int,
    load: LoadSummary | None,
) -> CensusRow:
    """Return the row of one host: its free units that fit, how many of `count` requests it can take, and why the host
    does not fit, if so. `absence` is why its agent cannot be asked, '' if it can be; `wanted_groups` None means any
    unit.
    """
    if wanted_groups is None:
        fitting, room = host_candidates, min(count, sum(one.free for one in host_candidates))
    else:
        fitting = [one for one in host_candidates if any(one.matches_group(group) for group in wanted_groups)]
        room = candidates.count_possible_choices(wanted_groups, fitting, count)
    free, why = sum(one.free for one in fitting), absence
    if not why and not free:
        why = "it has no free unit that is ready and fits"
    elif not why and room < count:
        why = f"room for {room} of {count}"
    return CensusRow(host, free, room, not why, why, load)


def _compute_load_by_host(loads: LoadSnapshot) -> dict[int, LoadSummary]:
    """Return the load of each host that answered, also of hosts whose devices reported nothing."""
    load_of_hosts = usage_with_load.compute_host_loads(loads)
    return {key: load_of_hosts.get(key, LoadSummary()) for key in loads.hosts}


def _explain_missing_hosts(
    hosts: Sequence[Host], absences: Mapping[int, str], loads: LoadSnapshot, within_s: float
) -> list[tuple[Host, str]]:
    """Return each of these hosts, none of which answered, with the reason, as far as it is known.

    Asks the gateways once for the last samples of those that should have answered.
    """
    asked_hosts = [host.pk for host in hosts if not absences[host.pk]]
    last_loads = telemetry.get_last_loads(asked_hosts).hosts if asked_hosts else {}
    return [
        (host, absences[host.pk] or _explain_silence(last_loads.get(host.pk), loads.silent, within_s)) for host in hosts
    ]


def _explain_silence(last_load: telemetry.HostLoad | None, gateways: Sequence[str], within_s: float) -> str:
    """Return why a host that was asked did not answer, as far as it is known. `last_load` is its last sample;
    `gateways` are those that did not answer.
    """
    if last_load is not None:
        age_s = max(0.0, database_clock.estimate_timestamp() - last_load.at)
        return f"silent: no answer within {within_s:g} s; it last spoke {age_s:.0f} s ago"
    if gateways:
        return f"gateway not answering: {', '.join(gateways)[:200]} may hold its connection"
    return "its agent has never sent samples: it is an older release, or it has just connected"
