"""Record events and seal them, as tests of the seals need it."""

from __future__ import annotations

from accelerators import conductor
from accelerators.audit import sealing
from accelerators.domain.states import EventSource
from accelerators.models import Seal


def record_events(*names: str) -> None:
    """Record one event with each of these names, in one transaction."""
    with conductor.writing():
        conductor.record_events(
            [conductor.build_event("device.odd", EventSource.SYSTEM, "test", subject=(None, name)) for name in names]
        )


def create_seals(max_events: int = sealing.MAX_EVENTS_PER_SEAL) -> list[Seal]:
    """Seal all events, at most `max_events` in each seal; return all seals."""
    while sealing.seal_oldest_events(max_events):
        pass
    return list(Seal.objects.order_by("number"))
