"""The load census: ask hosts now how busy they are and compare it with their free units; hosts that fit come first.

It only reads: nothing is reserved for the caller, and Placement and the bind decide again. It costs at most five
statements and one question to the gateways, whatever the number of hosts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelerators.domain import groups
from accelerators.domain.errors import Reason, RefusedError
from accelerators.models import Host
from accelerators.requests import candidates, profiles
from accelerators.requests.candidates import Candidate
from accelerators.requests.capacity import Load
from agents import telemetry
from agents.liveness import word_of
from agents.telemetry import Loads
from cyborgweb.telemetry import usage_with_load

MOST_HOSTS = 10_000
MOST_NAMED = 1_000
"""Hosts that one question can name."""
MOST = groups.MAX_REQUESTS
"""Requests that one question can ask for."""
WITHIN_S, LONGEST_S = 2.0, 10.0
AT_ONCE = 2
"""Censuses that one process runs at a time: each occupies a thread for as long as it lasts."""
_turns = threading.BoundedSemaphore(AT_ONCE)
SPEAK = ("up", "late")
"""Liveness of agents that are asked; the others could not answer."""


class CensusBusyError(RefusedError):
    """This process already runs AT_ONCE censuses. `wait` is the value for Retry-After, in seconds."""

    wait = 5

    def __init__(self) -> None:
        super().__init__(Reason.AWAY, f"{AT_ONCE} censuses are under way in this process: try again in a few seconds.")


@dataclass(frozen=True)
class Question:
    """What to ask.

    Which hosts (None: all), for how many requests (`count`) of which profile ('': any unit), and how many seconds to
    wait.
    """

    hosts: tuple[str, ...] | None = None
    profile: str = ""
    count: int = 1
    within_s: float = WITHIN_S


@dataclass(frozen=True)
class Row:
    """One host of the answer.

    `free` is the number of units that fit; `room` is how many requests find a place, at most as many as were asked for;
    `why` is the reason if the host does not fit. `load` is None if the host did not answer.
    """

    host: Host
    free: int
    room: int
    fits: bool
    why: str
    load: Load | None

    @property
    def order(self) -> tuple[bool, bool, float, str]:
        """Sort key: hosts that fit first, then the least busy; an unknown load comes last."""
        mean = self.load.mean if self.load else None
        return not self.fits, mean is None, mean or 0.0, self.host.name


@dataclass(frozen=True)
class Census:
    """The result of a census.

    `came`: how many hosts answered; `missing`: the others, with the reason; `left_out`: how many hosts there are beyond
    MOST_HOSTS.
    """

    came: int
    missing: list[tuple[Host, str]]
    rows: list[Row]
    took_s: float
    left_out: int = 0

    @property
    def fitting(self) -> int:
        """Return how many hosts fit."""
        return sum(row.fits for row in self.rows)


def take(question: Question) -> Census:
    """Take a census; blocks for up to the question's `within_s` seconds, plus the time of the statements.

    Raises CensusBusyError if AT_ONCE are running, RefusedError UNKNOWN for a host or a profile that does not
    exist, CONFLICT for a profile that asks for no accelerator.
    """
    if not _turns.acquire(blocking=False):
        raise CensusBusyError
    try:
        return _take(question)
    finally:
        _turns.release()


def _take(question: Question) -> Census:
    began = time.monotonic()
    wanted = _wanted(question.profile)
    hosts, left_out = _hosts(question.hosts)
    words = {host.pk: _word(host) for host in hosts}
    there = candidates.at(list(words))
    asked = [key for key, word in words.items() if word in SPEAK]
    loads = telemetry.census(asked, question.within_s) if asked else Loads({})
    said = _said(loads)
    rows = [_row(host, words[host.pk], there[host.pk], wanted, question.count, said.get(host.pk)) for host in hosts]
    missing = _missing([host for host in hosts if host.pk not in said], words, loads, question.within_s)
    took = time.monotonic() - began
    return Census(len(said), missing, sorted(rows, key=lambda row: row.order), took, left_out)


def _wanted(name: str) -> tuple[Mapping[str, str], ...] | None:
    if not name:
        return None
    profile = profiles.by_name(name)
    if profile is None:
        raise RefusedError(Reason.UNKNOWN, f"There is no device profile {name!r}.")
    if not groups.plan(profile.groups):
        raise RefusedError(Reason.CONFLICT, f"Profile {name} asks for no accelerator.")
    return profile.groups


def _hosts(names: tuple[str, ...] | None) -> tuple[list[Host], int]:
    """Return the hosts with their agents, and the number of hosts beyond MOST_HOSTS.

    Raises RefusedError UNKNOWN for a name that does not exist.
    """
    found = Host.objects.select_related("agent", "lease").defer("drivers")
    if names is not None:
        hosts = list(found.filter(name__in=names))
        if unknown := sorted(set(names) - {host.name for host in hosts}):
            raise RefusedError(Reason.UNKNOWN, f"There is no host {', '.join(unknown)[:300]}.")
        return hosts, 0
    hosts = list(found[: MOST_HOSTS + 1])
    return hosts[:MOST_HOSTS], Host.objects.count() - MOST_HOSTS if len(hosts) > MOST_HOSTS else 0


def _word(host: Host) -> str:
    """Return the liveness of the host's agent, '' if no agent has joined."""
    agent = getattr(host, "agent", None)
    return word_of(agent) if agent else ""


def _row(
    host: Host,
    word: str,
    there: Sequence[Candidate],
    wanted: Sequence[Mapping[str, str]] | None,
    count: int,
    busy: Load | None,
) -> Row:
    if wanted is None:
        fitting, room = there, min(count, sum(one.free for one in there))
    else:
        fitting = [one for one in there if any(one.fits(group) for group in wanted)]
        room = candidates.room(wanted, fitting, count)
    free, why = sum(one.free for one in fitting), ""
    if word not in SPEAK:
        why = _why_not_asked(word)
    elif not free:
        why = "it has no free unit that is ready and fits"
    elif room < count:
        why = f"room for {room} of {count}"
    return Row(host, free, room, not why, why, busy)


def _said(loads: Loads) -> dict[int, Load]:
    """Return the load of each host that answered, also of hosts whose devices reported nothing."""
    found = usage_with_load.of_hosts(loads)
    return {key: found.get(key, Load()) for key in loads.hosts}


def _missing(hosts: Sequence[Host], words: Mapping[int, str], loads: Loads, within_s: float) -> list[tuple[Host, str]]:
    """Return the reason why each of these hosts did not answer, as far as it is known."""
    asked = [host.pk for host in hosts if words[host.pk] in SPEAK]
    before = telemetry.last(asked).hosts if asked else {}
    return [
        (host, _silence(before.get(host.pk), loads.silent, within_s))
        if words[host.pk] in SPEAK
        else (host, _why_not_asked(words[host.pk]))
        for host in hosts
    ]


def _silence(before: telemetry.HostLoad | None, gateways: Sequence[str], within_s: float) -> str:
    if before is not None:
        return f"silent: no answer within {within_s:g} s; it last spoke {max(0.0, time.time() - before.at):.0f} s ago"
    if gateways:
        return f"gateway not answering: {', '.join(gateways)[:200]} may hold its connection"
    return "its agent has never sent samples: it is an older release, or it has just connected"


def _why_not_asked(word: str) -> str:
    if not word:
        return "no agent has joined for it"
    return "its agent is down" if word == "down" else f"its agent may not connect: {word}"
