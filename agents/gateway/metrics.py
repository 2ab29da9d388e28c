"""Metrics of the gateways in this process.

The event loop counts in plain Python numbers; the writer thread adds the differences to the shared metrics whenever it
flushes leases. A Beat costs 37 µs in all, and writing its count directly to the shared metrics would add a tenth of
that.
"""

from __future__ import annotations

import threading
from collections import Counter

from accelerators.runtime import metrics

tally = {"beats": 0, "reports": 0, "opened": 0, "closed": 0, "taken": 0, "shed": 0}
"""Counts of all gateways of this process since it started. Only the event loop writes them."""
refused: Counter[str] = Counter()
"""Refused handshakes and fetches, and ended connections, by code. All codes are constants of this product."""

_connections = metrics.gauge("cyborg_agent_connections", "Open WebSocket connections from agents.")
_samples = metrics.counter("cyborg_agent_samples_total", "Samples messages: `taken`, or `shed` (dropped).", "outcome")
_pushed = {
    "opened": metrics.counter("cyborg_agent_handshakes_total", "Connections from agents that were accepted."),
    "beats": metrics.counter("cyborg_agent_beats_total", "Heartbeats that were acknowledged."),
    "reports": metrics.counter("cyborg_agent_reports_total", "Reports received, including those that changed nothing."),
    "taken": _samples.labels("taken"),
    "shed": _samples.labels("shed"),
}
_refusals = metrics.counter(
    "cyborg_agent_refusals_total",
    "Refused connections and image requests, and connections closed by the gateway.",
    "code",
)
_pushing = threading.Lock()
_told: Counter[str] = Counter()
_told_refused: Counter[str] = Counter()


def push() -> None:
    """Add what was counted since the last call to the shared metrics. Safe to call from several threads."""
    with _pushing:
        now, codes = Counter(tally), Counter(dict(refused))
        for name, meter in _pushed.items():
            meter.inc(now[name] - _told[name])
        for code, number in codes.items():
            _refusals.labels(code).inc(number - _told_refused[code])
        _connections.set(now["opened"] - now["closed"])
        _told.update(now - _told)
        _told_refused.update(codes - _told_refused)
