"""What gateways count. On the event loop in plain numbers; the writer thread pushes what came since, with the leases.

A Beat costs 37 µs in all: to write its count where other processes can read it would be a tenth of that.
"""

from __future__ import annotations

import threading
from collections import Counter

from accelerators.runtime import metrics

tally = {"beats": 0, "reports": 0, "opened": 0, "closed": 0, "taken": 0, "shed": 0}
"""Of all gateways of this process, since it started. Written on the event loop alone."""
refused: Counter[str] = Counter()
"""Who was turned away or sent away, by code; codes are words of our own."""

_connections = metrics.gauge("cyborg_agent_connections", "Agents' sockets that are open.")
_samples = metrics.counter("cyborg_agent_samples_total", "Messages with devices' loads: `taken`, or `shed`.", "outcome")
_pushed = {
    "opened": metrics.counter("cyborg_agent_handshakes_total", "Connections of agents that were let in."),
    "beats": metrics.counter("cyborg_agent_beats_total", "Beats that were acknowledged."),
    "reports": metrics.counter("cyborg_agent_reports_total", "Reports that came, those that changed nothing as well."),
    "taken": _samples.labels("taken"),
    "shed": _samples.labels("shed"),
}
_refusals = metrics.counter(
    "cyborg_agent_refusals_total", "Handshakes and fetches that were refused, connections that were ended.", "code"
)
_pushing = threading.Lock()
_told: Counter[str] = Counter()
_told_refused: Counter[str] = Counter()


def push() -> None:
    """Make known what was counted since the last time. Called by the writer thread, every few seconds."""
    with _pushing:
        now, codes = Counter(tally), Counter(dict(refused))
        for name, meter in _pushed.items():
            meter.inc(now[name] - _told[name])
        for code, number in codes.items():
            _refusals.labels(code).inc(number - _told_refused[code])
        _connections.set(now["opened"] - now["closed"])
        _told.update(now - _told)
        _told_refused.update(codes - _told_refused)
