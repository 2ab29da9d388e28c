"""Report binds that are refused without a change, as few events, so that the overview shows those that repeat.

A bind that makes its requests BindFailed has an event for each request instead (`binding_sql.MOVE_REQUESTS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerators import conductor
from accelerators.domain.bind_failures import BindFailure
from accelerators.domain.caller import request_id
from accelerators.domain.states import EventSource
from accelerators.refusal_counts import RefusalKind, Refusals, note_refusal

ACTION = "request.bind_refused"
REFUSED_BINDS_HOST = "(binds)"
"""Stands in place of a host name in these events: an event counts the refusals of all hosts."""


def note_refused_bind(failure: BindFailure, uuid: str, instance: str, host: str, provider: str, text: str) -> None:
    """Count a request whose bind was refused because of `failure`. It writes nothing."""
    details = {
        "uuid": uuid,
        "hostname": host[:255],
        "device_rp_uuid": provider,
        "instance_uuid": instance,
        "request_id": request_id.get(),
        "text": text,
    }
    note_refusal(_REFUSED_BINDS, failure.value, details=details)


def _build_events(refusals: Mapping[str, Refusals]) -> list[dict[str, Any]]:
    """Return an event for each reason, with the number of requests and the newest of them."""
    return [_build_event(failure, refused) for failure, refused in refusals.items()]


def _build_event(failure: str, refused: Refusals) -> dict[str, Any]:
    newest = dict(refused.details)
    request, text = newest.pop("request_id"), newest.pop("text")
    values = {"failure": failure, "number": refused.number} | newest
    event = conductor.build_event(
        ACTION,
        EventSource.SYSTEM,
        "binds",
        host_name=REFUSED_BINDS_HOST,
        subject=(None, failure),
        changes={name: [None, value] for name, value in values.items()},
        reason=text,
    )
    return event | {"request_id": request}


_REFUSED_BINDS = RefusalKind(_build_events)
