"""Raise an intent for each resolved request, so that Nova is notified of it (contract section 4.3).

The intents are raised in the transaction that moves the requests. If no job is registered for this kind of intent, none
is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerators import conductor
from accelerators.domain.states import BIND_ENDED_STATES, RequestState
from accelerators.runtime import jobs

NOTICE_INTENT = "notice"


def raise_notice_intents(moves: Iterable[Mapping[str, Any]]) -> None:
    """Raise one intent for each of these moves that ends in Bound or BindFailed; one statement.

    Does nothing if no job handles these intents. `moves` are rows for `binding._move_requests`.
    """
    if jobs.has_handler(NOTICE_INTENT):
        conductor.raise_intents(
            NOTICE_INTENT,
            {move["uuid"]: _build_notice_payload(move) for move in moves if move["state"] in BIND_ENDED_STATES},
        )


def _build_notice_payload(move: Mapping[str, Any]) -> dict[str, Any]:
    """Build the intent's payload: the instance, whether its request is Bound, and the host."""
    completed = move["state"] == RequestState.BOUND
    return {"instance": str(move["instance"]), "completed": completed, "host": move["hostname"] or ""}
