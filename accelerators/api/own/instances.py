"""What somebody else knows of instances: their states and names. Nova's answers come in here without being imported.

`placement_sync` registers its source when it starts; `accelerators` of the own API are joined with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

UNKNOWN = "unknown"
log = logging.getLogger(__name__)


class Instance(NamedTuple):
    """An instance to ask for."""

    uuid: str
    project_id: str


class Known(NamedTuple):
    """`state` in Nova's words (ACTIVE, SHUTOFF…); `gone` when Nova has no such instance, `unknown` while it is away."""

    state: str = UNKNOWN
    name: str = ""


Source = Callable[[Collection[Instance]], Mapping[str, Known]]
"""Answers within 2 s for a page of instances, with what it knows by uuid; what is left out is unknown."""

_sources: list[Source] = []


def register(source: Source) -> None:
    """Ask `source` from now on; it takes the place of the one before."""
    _sources[:] = [source]


def states(instances: Collection[Instance]) -> Mapping[str, Known]:
    """What is known, by uuid. Without a source, or when it fails: nothing."""
    if not instances or not _sources:
        return {}
    try:
        return _sources[0](instances)
    except Exception:
        log.exception("the source of instances' states failed")
        return {}
