"""Notify Nova that a request is bound or failed: one event per request, one call per instance. It does not use Django.

`accelerators.requests.binding` raises an intent of the kind `notice` (key: the request) in the transaction that moves
the request; the intent wakes the job `notices`. Delivery is at least once: Nova accepts a repeated event. Contract
section 4.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EVENT_NAME, MICROVERSION, EVENTS_PATH = "accelerator-request-bound", "compute 2.82", "/os-server-external-events"
TIMEOUT_S = 10.0
FINAL_CODES = frozenset({200, 404, 422})
"""Codes of an event that need no retry: accepted (200); Nova does not know the instance (404); the instance has no host
yet, and Nova will query the request itself when it has (422).
"""


@dataclass(frozen=True)
class Notice:
    """The outcome of one request that Nova shall be notified of: bound if `completed`, otherwise failed.

    `request` and `instance` are uuids.
    """

    request: str
    instance: str
    completed: bool


@dataclass(frozen=True)
class NoticeResult:
    """The result of a notice.

    `is_final` says that no retry is needed, `needs_attention` that a person should look at it. `nova_unavailable` says
    that Nova was unreachable, throttled, refused the credentials or answered unusably, so further calls are pointless
    for now.
    """

    is_final: bool
    text: str
    needs_attention: bool = False
    nova_unavailable: bool = False


def build_body(notices: Sequence[Notice]) -> dict[str, Any]:
    """Return the body of one call of Nova's server external events: one event per notice, in their order."""
    return {
        "events": [
            {
                "name": EVENT_NAME,
                "server_uuid": notice.instance,
                "tag": notice.request,
                "status": "completed" if notice.completed else "failed",
            }
            for notice in notices
        ]
    }


def interpret_answer(notices: Sequence[Notice], status: int, answer: object) -> list[NoticeResult]:
    """Return what Nova's answer means for each notice, in their order. This is a pure function.

    `status` is the HTTP status, `answer` the decoded body. A notice that the answer lacks is accepted if the status is
    200, and has to be sent again if it is 207.
    """
    if status == 404:
        return [NoticeResult(True, "404: Nova does not know the instance")] * len(notices)
    if status >= 500 or status in (401, 403, 408, 429):
        return [
            NoticeResult(False, f"Nova answered {status}", needs_attention=status in (401, 403), nova_unavailable=True)
        ] * len(notices)
    if status not in (200, 207):
        return [NoticeResult(False, f"Nova answered {status}", needs_attention=True)] * len(notices)
    codes = _parse_event_codes(answer)
    if codes is None:
        return [
            NoticeResult(False, f"Nova answered {status}, but not with a list of events", nova_unavailable=True)
        ] * len(notices)
    return [_interpret_code(codes.get(notice.request, 200 if status == 200 else 0)) for notice in notices]


def send_notices(session: Any, endpoint: str, notices: Sequence[Notice]) -> list[NoticeResult]:
    """Send the notices in one call through a keystoneauth1 session and return the result of each.

    Blocks for up to TIMEOUT_S. Errors of the call are not raised: all results then have `nova_unavailable` set.
    `endpoint` overrides the address of Nova in Keystone's catalogue, unless it is ''.
    """
    from keystoneauth1.exceptions import ClientException

    try:
        answer = session.request(
            EVENTS_PATH,
            "POST",
            json=build_body(notices),
            endpoint_filter={"service_type": "compute"},
            headers={"OpenStack-API-Version": MICROVERSION, "Accept": "application/json"},
            timeout=TIMEOUT_S,
            connect_retries=0,
            raise_exc=False,
            log=False,
            **({"endpoint_override": endpoint} if endpoint else {}),
        )
    except ClientException as error:
        return [NoticeResult(False, " ".join(str(error).split())[:300], nova_unavailable=True)] * len(notices)
    try:
        decoded = answer.json()
    except ValueError:
        decoded = None
    return interpret_answer(notices, answer.status_code, decoded)


def _parse_event_codes(answer: object) -> Mapping[str, int] | None:
    """Return the code of each request's event, or None if the answer is no list of events.

    Events whose code is not a number are left out.
    """
    events = answer.get("events") if isinstance(answer, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        return None
    return {str(event.get("tag")): code for event in events if isinstance(code := event.get("code"), int)}


def _interpret_code(code: int) -> NoticeResult:
    """Return the result that the code of one event stands for; 0 means that Nova's answer lacks the event.

    FINAL_CODES need no retry. Any other code has to be sent again and needs a person's attention.
    """
    meaning = {
        200: "accepted",
        404: "Nova does not know the instance",
        422: "the instance has no host yet; Nova will query the request when it has one",
    }.get(code, "not answered" if not code else "refused")
    return NoticeResult(code in FINAL_CODES, f"{code or ''} {meaning}".strip(), needs_attention=code not in FINAL_CODES)
