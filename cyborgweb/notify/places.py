"""Decide which webhooks may begin, so that slow receivers delay only the webhooks of their own projects.

Pure functions. A place is one of the attempts that can be in flight at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar

MAX_WEBHOOKS, MAX_WEBHOOKS_PER_PROJECT, MAX_WEBHOOKS_PER_HOST = 64, 8, 4
"""Simultaneous attempts in all, of the subscriptions of one project, and to one destination host."""
MAX_OF_SLOW, MAX_OF_SLOW_PER_HOST = MAX_WEBHOOKS // 4, MAX_WEBHOOKS_PER_HOST // 2
"""Simultaneous attempts of all slow projects together, and those of them to one destination host."""
FEW = 2
"""Simultaneous attempts of a slow project; and of any project while at least half of all places are taken."""


class Attempt(Protocol):
    """An attempt to deliver a message to a webhook."""

    @property
    def project_id(self) -> str:
        """The project of its subscription."""

    @property
    def host(self) -> str:
        """The destination host, with its port if the URL names one."""

    @property
    def is_slow(self) -> bool:
        """Whether a receiver of the project was slow lately."""


SomeAttempt = TypeVar("SomeAttempt", bound=Attempt)


def may_take_place(taken: int, taken_by_project: int, total: int, per_project: int) -> bool:
    """Return whether a project may take one more of `total` places, of which `taken` are taken.

    While less than half of them are taken, it may have `per_project`, and then FEW: the first few projects whose
    receivers hang cannot take the places of all others.
    """
    return taken < total and taken_by_project < (per_project if taken < total // 2 else FEW)


def choose_webhooks(due: Iterable[SomeAttempt], in_flight: Collection[Attempt]) -> list[SomeAttempt]:
    """Return those of the due attempts that may begin now besides those in flight, in their order.

    Slow projects together get at most a quarter of all places, and half of those of one destination host.
    """
    by_project, by_host = Counter(one.project_id for one in in_flight), Counter(one.host for one in in_flight)
    slow_by_host = Counter(one.host for one in in_flight if one.is_slow)
    chosen = []
    for one in due:
        project_limit = FEW if one.is_slow else MAX_WEBHOOKS_PER_PROJECT
        is_slow_limit_reached = slow_by_host.total() >= MAX_OF_SLOW or slow_by_host[one.host] >= MAX_OF_SLOW_PER_HOST
        if (
            may_take_place(by_project.total(), by_project[one.project_id], MAX_WEBHOOKS, project_limit)
            and by_host[one.host] < MAX_WEBHOOKS_PER_HOST
            and not (one.is_slow and is_slow_limit_reached)
        ):
            by_project[one.project_id] += 1
            by_host[one.host] += 1
            slow_by_host[one.host] += one.is_slow
            chosen.append(one)
    return chosen
