"""Look up the state and the name of instances from a registered source, without importing the Nova client.

`placement_sync` registers its source when it starts. The `accelerators` resource adds the answers to its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

UNKNOWN_STATE = "unknown"
log = logging.getLogger(__name__)


class InstanceKey(NamedTuple):
    """An instance whose state is looked up."""

    uuid: str
    project_id: str


class InstanceState(NamedTuple):
    """The state and name of an instance.

    `state` is Nova's word (ACTIVE, SHUTOFF…), `gone` if Nova has no such instance, or `unknown` while Nova does not
    answer.
    """

    state: str = UNKNOWN_STATE
    name: str = ""


InstanceStateSource = Callable[[Collection[InstanceKey]], Mapping[str, InstanceState]]
"""A function that returns, by uuid, the states of one page of instances within 2 s. An instance that it leaves out is
`unknown`."""

_sources: list[InstanceStateSource] = []


def register_source(source: InstanceStateSource) -> None:
    """Use `source` from now on; it replaces the source registered before."""
    _sources[:] = [source]


def fetch_instance_states(instances: Collection[InstanceKey]) -> Mapping[str, InstanceState]:
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
