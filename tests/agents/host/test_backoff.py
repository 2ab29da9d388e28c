"""Tests of back-off and of the deadlines for acknowledgements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agents.host.backoff import Backoff, ConnectionTiming, PendingAcks, should_log_repetition


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 200))
def test_back_off_is_full_jitter_between_zero_and_a_doubling_cap(draw: float, failures: int) -> None:
    backoff = Backoff(ConnectionTiming(draw_fraction=lambda: draw))
    delays = [backoff.next_delay() for _ in range(failures)]
    assert delays == [draw * min(30.0, 0.5 * 2.0**n) for n in range(failures)]


def test_back_off_starts_again_at_its_minimum_after_a_reset() -> None:
    backoff = Backoff(ConnectionTiming(draw_fraction=lambda: 1.0))
    assert [backoff.next_delay() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    backoff.reset()
    assert backoff.next_delay() == 0.5


def test_a_beat_without_ack_is_overdue_after_three_intervals_but_not_before_15_seconds() -> None:
    owed = PendingAcks(beat_s=2.0, timing=ConnectionTiming())
    owed.record_sent("Beat", 1, now=100.0)
    owed.record_sent("Beat", 2, now=102.0)
    assert owed.describe_overdue(114.9) == ""
    assert "acknowledged nothing for 15 s" in owed.describe_overdue(115.0)
    slow = PendingAcks(beat_s=10.0, timing=ConnectionTiming())
    slow.record_sent("Beat", 1, now=100.0)
    assert slow.next_deadline() == 130.0


def test_a_report_is_overdue_only_after_a_minute_while_heartbeats_are_acknowledged() -> None:
    owed = PendingAcks(beat_s=2.0, timing=ConnectionTiming())
    owed.record_sent("Report", 7, now=0.0)
    for second in range(2, 60, 2):
        owed.record_sent("Beat", second, float(second))
        owed.record_ack("Beat", second, float(second))
        assert owed.describe_overdue(float(second)) == ""
    assert "not acknowledged report 7" in owed.describe_overdue(60.0)
    owed.record_ack("Report", 7, 60.0)
    assert owed.next_deadline() == float("inf")


def test_an_acknowledged_result_does_not_count_for_the_heartbeats_with_lower_numbers() -> None:
    owed = PendingAcks(beat_s=2.0, timing=ConnectionTiming())
    owed.record_sent("Beat", 1, now=100.0)
    owed.record_ack("Result", 500, 101.0)
    assert owed.next_deadline() == 116.0
    owed.record_ack("Beat", 1, 102.0)
    assert owed.next_deadline() == float("inf")


@given(st.lists(st.tuples(st.sampled_from(["sent", "acknowledged"]), st.integers(0, 5)), max_size=40))
def test_there_is_no_deadline_when_every_message_is_acknowledged(steps: list[tuple[str, int]]) -> None:
    owed, last, acknowledged = PendingAcks(beat_s=1.0, timing=ConnectionTiming()), 0, 0
    for now, (step, seq) in enumerate(steps):
        if step == "sent":
            last += 1
            owed.record_sent("Beat", last, float(now))
        else:
            acknowledged = max(acknowledged, min(seq, last))
            owed.record_ack("Beat", min(seq, last), float(now))
    assert (owed.next_deadline() == float("inf")) == (acknowledged == last)


def test_attempts_of_a_long_outage_are_logged_at_powers_of_two() -> None:
    assert [n for n in range(1, 40) if should_log_repetition(n)] == [1, 2, 4, 8, 16, 32]
