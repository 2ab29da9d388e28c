"""The job `notices`: send the intents of the kind `notice` to Nova; those of one instance go in one call."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

from django.conf import settings

from accelerators import conductor, outbox
from accelerators.domain.states import EventSource
from accelerators.runtime import jobs
from placement_sync.cloud import get_cloud_session
from placement_sync.nova.notices import Notice, NoticeResult, send_notices

KIND, JOB = "notice", "notices"
INTENT_BATCH = 256
SEND_DEADLINE_S = 20.0
"""Seconds after which a batch begins no further call. The cluster kills a job after 60 s."""
MAX_PARALLEL_CALLS = 8
"""Calls that are made at the same time. After a call that found Nova away, no other is started."""


def run() -> None:
    """Run the job `notices`: send notices until none is due, Nova is away, or its time slice is over."""
    jobs.run_steps_outside_transaction(JOB, step)


def step() -> bool:
    """Send one batch of notices; return True if there may be more.

    If Nova is off or not configured, the batch is discarded. After a call that found Nova away, the remaining notices
    of the batch get its result without a call, and False is returned.
    """
    due = outbox.load_due_intents(KIND, INTENT_BATCH)
    if not due:
        return False
    if (cloud := get_cloud_session(settings.KEYS.nova_endpoint)) is None:
        outbox.delete_done_intents(due)
        return len(due) == INTENT_BATCH
    by_instance: dict[str, list[outbox.DueIntent]] = {}
    for intent in due:
        by_instance.setdefault(intent.payload["instance"], []).append(intent)
    outages: list[NoticeResult] = []
    give_up_at, has_more = time.monotonic() + SEND_DEADLINE_S, len(due) == INTENT_BATCH

    def send_to_instance(intents: list[outbox.DueIntent]) -> list[NoticeResult]:
        """Send the notices of one instance and return their results; make no call once Nova was found away, or after
        SEND_DEADLINE_S: then there are no results."""
        if outages:
            return outages[:1] * len(intents)
        if time.monotonic() > give_up_at:
            return []
        notices = [Notice(intent.key, intent.payload["instance"], intent.payload["completed"]) for intent in intents]
        answers = send_notices(cloud, settings.KEYS.nova_endpoint, notices)
        outages.extend(answer for answer in answers if answer.nova_unavailable)
        return answers

    with ThreadPoolExecutor(MAX_PARALLEL_CALLS, thread_name_prefix="notices") as executor:
        for told, answers in zip(
            by_instance.values(), executor.map(send_to_instance, by_instance.values()), strict=True
        ):
            if not answers:
                has_more = True  # their intents stay due
                continue
            with conductor.writing():
                _store_results(told, answers)
    return has_more and not outages


def _store_results(intents: list[outbox.DueIntent], answers: list[NoticeResult]) -> None:
    """Record events, delete the intents of notices that need no retry, and schedule the retry of the others.

    An event is recorded for each notice that needs no retry, and for the first refusal. None is recorded for a notice
    that failed because Nova was away, unless Nova refused the credentials. Call it inside `conductor.writing()`.
    """
    pairs = list(zip(intents, answers, strict=True))
    conductor.record_events(
        [
            _build_event(*pair)
            for pair in pairs
            if pair[1].is_final or (pair[1].needs_attention and not pair[0].attempts)
        ]
    )
    outbox.delete_done_intents([intent for intent, answer in pairs if answer.is_final])
    for text in sorted({answer.text for answer in answers if not answer.is_final}):
        outbox.record_failures(
            [intent for intent, answer in pairs if not answer.is_final and answer.text == text], text
        )


def _build_event(intent: outbox.DueIntent, answer: NoticeResult) -> dict[str, Any]:
    """Build the event `request.notified`, or `request.notice_refused` if the notice has to be sent again."""
    status = "completed" if intent.payload["completed"] else "failed"
    return conductor.build_event(
        "request.notified" if answer.is_final else "request.notice_refused",
        EventSource.SYSTEM,
        "nova",
        host_name=intent.payload.get("host", ""),
        subject=(UUID(intent.key), ""),
        changes={"notice": [None, status]},
        reason=f"Nova was told {status}: {answer.text}",
    )
