"""Store what the jobs that seal and verify events found, for the console and the metrics (`AuditStatus`)."""

from __future__ import annotations

from collections.abc import Sequence

from django.db.models.functions import Now

from accelerators import conductor
from accelerators.models import AuditStatus

MAX_TEXT = 2000


def store_refusal(reason: str) -> None:
    """Store why nothing is sealed, and since when; '' if events are sealed. Costs one statement if it is stored
    already."""
    stored = AuditStatus.objects.filter(pk=1).first()
    if (stored.refusal if stored else "") == reason[:MAX_TEXT]:
        return
    values = {"refusal": reason[:MAX_TEXT], "refused_since": Now() if reason else None}
    with conductor.writing():
        AuditStatus.objects.update_or_create(pk=1, defaults=values)


def store_verification(number: int, findings: Sequence[str], is_complete: bool) -> None:
    """Store up to which seal the chain is verified, and the findings; `is_complete` says that the newest seal is
    verified. The first call counts as a complete one, so that the time of the last one is always known."""
    values = {"verified_number": number, "findings": len(findings), "finding": (findings or [""])[0][:MAX_TEXT]}
    with conductor.writing():
        status, _ = AuditStatus.objects.update_or_create(pk=1, defaults=values)
        if is_complete or status.verified_at is None:
            AuditStatus.objects.filter(pk=1).update(verified_at=Now())
