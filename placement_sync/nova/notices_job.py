"""The job `notices`: send the intents of the kind `notice` to Nova; those of one instance go in one call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.conf import settings

from accelerators import conductor, outbox
from accelerators.domain.states import Source
from accelerators.runtime import jobs
from placement_sync.cloud import session
from placement_sync.nova.notices import Answer, Notice, tell

KIND, JOB = "notice", "notices"
BATCH = 256
AT_ONCE = 8
"""Calls that are made at the same time. After a call that found Nova away, no other is started."""


def run() -> None:
    """Run the job."""
    jobs.run_outside_transaction(JOB, step)


def step() -> bool:
    """Send one batch of notices; return True if there may be more.

    If Nova is off or not configured, the batch is discarded.
    """
    due = outbox.due(KIND, BATCH)
    if not due:
        return False
    if (there := session(settings.KEYS.nova_endpoint)) is None:
        outbox.done(due)
        return len(due) == BATCH
    by_instance: dict[str, list[outbox.Due]] = {}
    for intent in due:
        by_instance.setdefault(intent.payload["instance"], []).append(intent)
    away: list[Answer] = []

    def one(told: list[outbox.Due]) -> list[Answer]:
        if away:
            return away[:1] * len(told)
        notices = [Notice(intent.key, intent.payload["instance"], intent.payload["completed"]) for intent in told]
        answers = tell(there, settings.KEYS.nova_endpoint, notices)
        away.extend(answer for answer in answers if answer.away)
        return answers

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="notices") as threads:
        for told, answers in zip(by_instance.values(), threads.map(one, by_instance.values()), strict=True):
            with conductor.writing():
                _record(told, answers)
    return len(due) == BATCH and not away


def _record(told: list[outbox.Due], answers: list[Answer]) -> None:
    """Record events, then mark intents done or schedule their retry.

    An event is recorded for each notice that needs no retry, and for the first refusal. None is recorded for a notice
    that failed because Nova was away, unless Nova refused the credentials.
    """
    pairs = list(zip(told, answers, strict=True))
    conductor.record_all([_event(*pair) for pair in pairs if pair[1].done or (pair[1].alarm and not pair[0].attempts)])
    outbox.done([intent for intent, answer in pairs if answer.done])
    for text in sorted({answer.text for answer in answers if not answer.done}):
        outbox.failed([intent for intent, answer in pairs if not answer.done and answer.text == text], text)


def _event(intent: outbox.Due, answer: Answer) -> dict[str, Any]:
    status = "completed" if intent.payload["completed"] else "failed"
    return {
        "source": Source.SYSTEM,
        "actor": "nova",
        "action": "request.notified" if answer.done else "request.notice_refused",
        "subject_type": "request",
        "subject": intent.key,
        "subject_name": "",
        "host": intent.payload.get("host", "")[:255],
        "changes": {"notice": [None, status]},
        "reason": f"Nova was told {status}: {answer.text}"[:4096],
    }
