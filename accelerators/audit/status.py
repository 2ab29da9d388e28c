"""Store what the jobs that seal and verify events found, for the console and the metrics (`AuditStatus`).

Each node has a row of its own, so that a node without findings does not hide those of another one.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db.models.functions import Now

from accelerators import conductor
from accelerators.models import AuditStatus
from accelerators.runtime import database_clock

MAX_TEXT = 2000
KEEP_SEALED_AT_FOR = timedelta(minutes=1)
KEEP_NODES_FOR = timedelta(days=1)
"""The row of a node is deleted when its jobs have not written it for this time: that node is gone."""


def get_node() -> str:
    """Return the name of this machine, under which its results are stored."""
    return socket.gethostname()[:255]


def store_refusal(reason: str) -> None:
    """Store why this node seals nothing, and since when; '' if it seals. Costs one statement if the same was stored
    within the last minute."""
    reason, now = _clean(reason), database_clock.now()
    stored = AuditStatus.objects.filter(pk=get_node()).first()
    is_same = stored is not None and stored.refusal == reason
    written_at = stored and (stored.updated_at if reason else stored.sealed_at)
    if is_same and written_at and timedelta(0) <= now - written_at < KEEP_SEALED_AT_FOR:
        return
    values: dict[str, object] = {"refusal": reason, "updated_at": Now()}
    if not is_same:
        values["refused_since"] = Now() if reason else None
    if not reason:
        values["sealed_at"] = Now()
    with conductor.writing():
        AuditStatus.objects.update_or_create(pk=get_node(), defaults=values)


def store_verification(number: int, findings: Sequence[str], is_complete: bool) -> None:
    """Store up to which seal this node has verified the chain, and the findings; `is_complete` says that the newest
    seal is verified. The first call counts as a complete one, so that the time of the last one is always known. Deletes
    the rows of nodes that are gone."""
    values = {"verified_number": number, "findings": len(findings), "finding": _clean((findings or [""])[0])}
    with conductor.writing():
        status, _ = AuditStatus.objects.update_or_create(pk=get_node(), defaults=values | {"updated_at": Now()})
        if is_complete or status.verified_at is None:
            AuditStatus.objects.filter(pk=get_node()).update(verified_at=Now())
        AuditStatus.objects.filter(updated_at__lt=Now() - KEEP_NODES_FOR).delete()


def store_restore(restored_at: datetime, text: str) -> None:
    """Store when the database was last restored, and what its seal says, in the row that this node has already."""
    with conductor.writing():
        AuditStatus.objects.filter(pk=get_node()).update(restored_at=restored_at, restore=_clean(text))


def store_failure(reason: str) -> None:
    """Store that this node's verification failed, as its only finding."""
    values = {"findings": 1, "finding": _clean(reason), "updated_at": Now()}
    with conductor.writing():
        AuditStatus.objects.update_or_create(pk=get_node(), defaults=values)


def _clean(text: str) -> str:
    """Return the text in a form that PostgreSQL can store."""
    return text[:MAX_TEXT].replace("\0", "").encode(errors="replace").decode()
