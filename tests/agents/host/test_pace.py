"""When to try again, and when to stop waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agents.host.backoff import Backoff, Owed, Pace, worth_saying


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 200))
def test_back_off_is_full_jitter_between_zero_and_a_doubling_cap(draw: float, failures: int) -> None:
    backoff = Backoff(Pace(draw=lambda: draw))
    delays = [backoff.next() for _ in range(failures)]
    assert delays == [draw * min(30.0, 0.5 * 2.0**n) for n in range(failures)]


def test_back_off_starts_anew_after_a_good_connection() -> None:
    backoff = Backoff(Pace(draw=lambda: 1.0))
    assert [backoff.next() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    backoff.reset()
    assert backoff.next() == 0.5


def test_a_beat_without_ack_is_overdue_after_three_intervals_but_not_before_15_seconds() -> None:
    owed = Owed(beat_s=2.0, pace=Pace())
    owed.sent("Beat", 1, now=100.0)
    owed.sent("Beat", 2, now=102.0)
    assert owed.overdue(114.9) == ""
    assert "acknowledged nothing for 15 s" in owed.overdue(115.0)
    slow = Owed(beat_s=10.0, pace=Pace())
    slow.sent("Beat", 1, now=100.0)
    assert slow.due() == 130.0


def test_a_report_may_wait_longer_while_beats_are_acknowledged() -> None:
    owed = Owed(beat_s=2.0, pace=Pace())
    owed.sent("Report", 7, now=0.0)
    for second in range(2, 60, 2):
        owed.sent("Beat", second, float(second))
        owed.acknowledged("Beat", second, float(second))
        assert owed.overdue(float(second)) == ""
    assert "not report 7" in owed.overdue(60.0)
    owed.acknowledged("Report", 7, 60.0)
    assert owed.due() == float("inf")


@given(st.lists(st.tuples(st.sampled_from(["sent", "acknowledged"]), st.integers(0, 5)), max_size=40))
def test_whoever_is_owed_nothing_waits_for_nothing(steps: list[tuple[str, int]]) -> None:
    owed, last, acknowledged = Owed(beat_s=1.0, pace=Pace()), 0, 0
    for now, (step, seq) in enumerate(steps):
        if step == "sent":
            last += 1
            owed.sent("Beat", last, float(now))
        else:
            acknowledged = max(acknowledged, min(seq, last))
            owed.acknowledged("Beat", min(seq, last), float(now))
    assert (owed.due() == float("inf")) == (acknowledged == last)


def test_a_long_outage_is_said_ever_more_rarely() -> None:
    assert [n for n in range(1, 40) if worth_saying(n)] == [1, 2, 4, 8, 16, 32]
