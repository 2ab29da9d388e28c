"""Look up the state and the name of instances from a registered source, without importing the Nova client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from accelerators.runtime.registry import Registry

UNKNOWN_STATE = "unknown"
log = logging.getLogger(__name__)


class InstanceKey(NamedTuple):
    """An instance whose state is looked up, and the project that it belongs to."""

    uuid: str
    project_id: str


class InstanceState(NamedTuple):
    """The state and name of an instance.

    `state` is Nova's word (ACTIVE, SHUTOFF…), `gone` if Nova has no such instance, or `unknown` while Nova does not
    answer.
    """

    state: str = UNKNOWN_STATE
    name: str = ""


INSTANCE_STATES: Registry[Callable[[Collection[InstanceKey]], Mapping[str, InstanceState]]] = Registry(
    "source of instance states", single=True
)
"""Function that returns, by uuid, the states of one page of instances within 2 s; an instance that it leaves out is
`unknown`. The resource `accelerators` adds the answers to its rows."""


def fetch_instance_states(instances: Collection[InstanceKey]) -> Mapping[str, InstanceState]:
    """Return what the source knows about these instances, by uuid; an instance may be missing in the answer.

    Returns an empty mapping if no source is registered. If the source raises, the error is logged and the mapping is
    empty.
    """
    if not instances or not INSTANCE_STATES:
        return {}
    try:
        return INSTANCE_STATES.only()(instances)
    except Exception:
        log.exception("the states of instances could not be looked up")
        return {}
