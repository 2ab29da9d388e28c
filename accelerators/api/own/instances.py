"""Look up the state and the name of instances from a registered source, without importing the Nova client.

`placement_sync` registers its source when it starts. The `accelerators` resource adds the answers to its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

UNKNOWN = "unknown"
log = logging.getLogger(__name__)


class Instance(NamedTuple):
    """An instance whose state is looked up."""

    uuid: str
    project_id: str


class Known(NamedTuple):
    """The state and name of an instance.

    `state` is Nova's word (ACTIVE, SHUTOFF…), `gone` if Nova has no such instance, or `unknown` while Nova does not
    answer.
    """

    state: str = UNKNOWN
    name: str = ""


Source = Callable[[Collection[Instance]], Mapping[str, Known]]
"""A function that returns, by uuid, the states of one page of instances within 2 s. An instance that it leaves out is
`unknown`."""

_sources: list[Source] = []


def register(source: Source) -> None:
    """Use `source` from now on; it replaces the source registered before."""
    _sources[:] = [source]


def states(instances: Collection[Instance]) -> Mapping[str, Known]:
    """Return what the source knows about these instances, by uuid.

    Returns an empty mapping if no source is registered. If the source raises, the error is logged and the mapping is
    empty.
    """
    if not instances or not _sources:
        return {}
    try:
        return _sources[0](instances)
    except Exception:
        log.exception("the states of instances could not be looked up")
        return {}
