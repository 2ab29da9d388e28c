"""Metrics of the gateways in this process.

The event loop counts in plain Python numbers; the writer thread adds the differences to the shared metrics whenever it
flushes leases. A Beat costs 37 µs in all, and writing its count directly to the shared metrics would add a tenth of
that.
"""

from __future__ import annotations

import threading
from collections import Counter

from accelerators.runtime import metrics

event_counts = dict.fromkeys(
    ("beats", "reports", "postponed", "opened", "closed", "taken", "shed", "unknown_fields", "unknown_types"), 0
)
"""Counts of all gateways of this process since it started. Only the event loop writes them."""
refusals_by_code: Counter[str] = Counter()
"""Refused handshakes and fetches, and ended connections, by code. All codes are constants of this product."""

_connections_gauge = metrics.create_gauge("cyborg_agent_connections", "Open WebSocket connections from agents.")
_samples_counter = metrics.create_counter(
    "cyborg_agent_samples_total", "Samples messages: `taken`, or `shed` (dropped).", "outcome"
)
_unknown_counter = metrics.create_counter(
    "cyborg_agent_unknown_total",
    "Ignored parts of agents' messages: unknown `fields`, or messages of unknown `types`.",
    "kind",
)
_counters = {
    "opened": metrics.create_counter("cyborg_agent_handshakes_total", "Connections from agents that were accepted."),
    "beats": metrics.create_counter("cyborg_agent_beats_total", "Heartbeats that were acknowledged."),
    "reports": metrics.create_counter(
        "cyborg_agent_reports_total", "Reports received, including those that changed nothing."
    ),
    "postponed": metrics.create_counter(
        "cyborg_agent_reports_postponed_total", "Reports that waited because their host sent more than its share."
    ),
    "taken": _samples_counter.labels("taken"),
    "shed": _samples_counter.labels("shed"),
    "unknown_fields": _unknown_counter.labels("fields"),
    "unknown_types": _unknown_counter.labels("types"),
}
_refusals_counter = metrics.create_counter(
    "cyborg_agent_refusals_total",
    "Refused connections and image requests, and connections closed by the gateway.",
    "code",
)
_push_lock = threading.Lock()
_pushed_counts: Counter[str] = Counter()
_pushed_refusals: Counter[str] = Counter()


def push_metrics() -> None:
    """Add the counts since the last call to the Prometheus metrics, and set the gauge of connections. Thread-safe."""
    with _push_lock:
        totals, codes = Counter(event_counts), Counter(dict(refusals_by_code))
        for name, meter in _counters.items():
            meter.inc(totals[name] - _pushed_counts[name])
        for code, number in codes.items():
            _refusals_counter.labels(code).inc(number - _pushed_refusals[code])
        _connections_gauge.set(totals["opened"] - totals["closed"])
        _pushed_counts.update(totals - _pushed_counts)
        _pushed_refusals.update(codes - _pushed_refusals)
