"""Nova is to hear of requests that have come to their end (contract section 4.3): one intent each.

`binding` raises them in the transaction that moves the requests. Whoever tells Nova registers for the kind; without
anybody none is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerators import conductor
from accelerators.domain.states import RESOLVED, RequestState
from accelerators.runtime import jobs

KIND = "notice"


def raised(moves: Iterable[Mapping[str, Any]]) -> None:
    """The intents for those of these moves that end in Bound or BindFailed."""
    if jobs.has_taker(KIND):
        conductor.intend(KIND, {move["uuid"]: _notice(move) for move in moves if move["state"] in RESOLVED})


def _notice(move: Mapping[str, Any]) -> dict[str, Any]:
    completed = move["state"] == RequestState.BOUND
    return {"instance": str(move["instance"]), "completed": completed, "host": move["hostname"] or ""}
