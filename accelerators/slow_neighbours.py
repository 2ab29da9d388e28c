"""Record as events which neighbours are slow: services of the cloud, the database, and clients that hold connections.

Whoever notices something slow calls `note`, which only counts in memory, also on the event loop. `record` writes the
events: the processes that serve HTTP and the workers of the clusters call it. The overview shows the events of the last
SHOWN_S seconds (`cyborgweb.monitoring.backlog`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from accelerators.domain.states import EventSource

ACTION = "neighbour.slow"
NEIGHBOURS = "(neighbours)"
"""Stands in place of a host name in these events, so that they are found by their host."""
WINDOW_S = 60.0
"""Seconds within which a neighbour must be slow as often as `note` says."""
EVENT_INTERVAL_S = 300.0
"""Minimum seconds between two events of one process about the same neighbour."""
SHOWN_S = 2 * EVENT_INTERVAL_S
"""Seconds for which an event is shown as an alert: as long as the neighbour is slow, there is a newer one."""
MAX_CLIENTS = 20
"""Maximum number of clients that a process counts; further ones are ignored. There are only a few other neighbours."""


@dataclass(slots=True)
class _Tally:
    """How often a neighbour was slow since `began_at`, and the worst time. `sentence` is the reason of the event."""

    began_at: float
    sentence: str
    needed: int
    is_client: bool
    count: int = 0
    worst_s: float = 0.0
    written_at: float = float("-inf")


_lock = threading.Lock()
_tallies: dict[str, _Tally] = {}


def note(name: str, sentence: str, seconds: float = 0.0, needed: int = 1, *, is_client: bool = False) -> None:
    """Count that the neighbour `name` was slow: it took `seconds`. It writes nothing.

    `record` writes an event when this was noted `needed` times within WINDOW_S. `sentence` is its reason, with the
    placeholders `{count}` and `{worst_s}`; it continues the name to a sentence.
    """
    now = time.monotonic()
    with _lock:
        if name not in _tallies:
            _delete_old_tallies(now)
            if is_client and sum(tally.is_client for tally in _tallies.values()) >= MAX_CLIENTS:
                return
        tally = _tallies.setdefault(name, _Tally(now, sentence, needed, is_client))
        if now - tally.began_at > WINDOW_S and tally.count < tally.needed:
            tally.began_at, tally.count, tally.worst_s = now, 0, 0.0
        tally.count, tally.worst_s, tally.sentence = tally.count + 1, max(tally.worst_s, seconds), sentence


def record() -> None:
    """Write an event for each neighbour that was slow often enough, in one statement; usually there is none.

    Raises database errors; the counts are kept then.
    """
    from accelerators import conductor  # not at the top: servers without Django count slow clients, too

    now = time.monotonic()
    with _lock:
        due = {name: tally for name, tally in _tallies.items() if _is_due(tally, now)}
        events = [_build_event(name, tally) for name, tally in due.items()]
    if not events:
        return
    conductor.record_events(events)
    with _lock:
        for tally in due.values():
            tally.written_at, tally.began_at, tally.count, tally.worst_s = now, now, 0, 0.0


def forget() -> None:
    """Delete all counts of this process. For tests."""
    with _lock:
        _tallies.clear()


def _is_due(tally: _Tally, now: float) -> bool:
    return tally.count >= tally.needed and now - tally.written_at >= EVENT_INTERVAL_S


def _build_event(name: str, tally: _Tally) -> dict[str, object]:
    from accelerators import conductor

    return conductor.build_event(
        ACTION,
        EventSource.SYSTEM,
        "slow neighbours",
        host_name=NEIGHBOURS,
        subject=(None, name),
        changes={"count": [None, tally.count]},
        reason=tally.sentence.format(count=tally.count, worst_s=tally.worst_s),
    )


def _delete_old_tallies(now: float) -> None:
    """Delete the tallies of neighbours that were not slow for EVENT_INTERVAL_S."""
    for name in [
        name for name, tally in _tallies.items() if now - tally.began_at > EVENT_INTERVAL_S and not _is_due(tally, now)
    ]:
        del _tallies[name]
