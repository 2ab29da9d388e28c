"""Telling Nova that a request is bound or failed: one event each, one call per instance. Free of Django but for `run`.

Intents of the kind `notice` (key: the request) wake the job `notices`; `accelerators.requests.binding` raises them
in the transaction that moves the request. At least once: Nova takes a repeated one. Contract section 4.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EVENT, VERSION, PATH = "accelerator-request-bound", "compute 2.82", "/os-server-external-events"
TIMEOUT_S = 10.0
ANSWERED = frozenset({200, 404, 422})
"""Codes of an entry after which it need not be told again: taken; the instance is gone; it has no host yet, and will
ask by itself when it has."""


@dataclass(frozen=True)
class Notice:
    """What is to be told of a request."""

    request: str
    instance: str
    completed: bool


@dataclass(frozen=True)
class Answer:
    """What came of a notice: `done` when it need not be told again, `alarm` when a person should look, `away` when
    nobody was there to answer."""

    done: bool
    text: str
    alarm: bool = False
    away: bool = False


def body(notices: Sequence[Notice]) -> dict[str, Any]:
    """The call that tells these."""
    return {
        "events": [
            {
                "name": EVENT,
                "server_uuid": notice.instance,
                "tag": notice.request,
                "status": "completed" if notice.completed else "failed",
            }
            for notice in notices
        ]
    }


def judge(notices: Sequence[Notice], status: int, answer: object) -> list[Answer]:
    """What Nova's answer means for each of them."""
    if status == 404:
        return [Answer(True, "404: Nova does not know the instance")] * len(notices)
    if status >= 500 or status in (401, 403, 408, 429):
        return [Answer(False, f"Nova answered {status}", alarm=status in (401, 403), away=True)] * len(notices)
    if status not in (200, 207):
        return [Answer(False, f"Nova answered {status}", alarm=True)] * len(notices)
    codes = _codes(answer)
    if codes is None:
        return [Answer(False, f"Nova answered {status} and no list of events", away=True)] * len(notices)
    return [_one(codes.get(notice.request, 200 if status == 200 else 0)) for notice in notices]


def tell(session: Any, endpoint: str, notices: Sequence[Notice]) -> list[Answer]:
    """One call through a keystoneauth1 session."""
    from keystoneauth1.exceptions import ClientException

    try:
        answer = session.request(
            PATH,
            "POST",
            json=body(notices),
            endpoint_filter={"service_type": "compute"},
            headers={"OpenStack-API-Version": VERSION, "Accept": "application/json"},
            timeout=TIMEOUT_S,
            connect_retries=0,
            raise_exc=False,
            log=False,
            **({"endpoint_override": endpoint} if endpoint else {}),
        )
    except ClientException as error:
        return [Answer(False, " ".join(str(error).split())[:300], away=True)] * len(notices)
    try:
        decoded = answer.json()
    except ValueError:
        decoded = None
    return judge(notices, answer.status_code, decoded)


def _codes(answer: object) -> Mapping[str, int] | None:
    """Request → the code of its entry."""
    events = answer.get("events") if isinstance(answer, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        return None
    return {str(event.get("tag")): code for event in events if isinstance(code := event.get("code"), int)}


def _one(code: int) -> Answer:
    meaning = {
        200: "taken",
        404: "Nova does not know the instance",
        422: "the instance has no host yet, and asks by itself when it has",
    }.get(code, "not answered" if not code else "refused")
    return Answer(code in ANSWERED, f"{code or ''} {meaning}".strip(), alarm=code not in ANSWERED)
