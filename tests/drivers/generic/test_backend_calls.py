"""Tests of the calls of one backend: one question at a time, in bounded time, and a pause after a late answer."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from drivers.errors import Busy, Failed, Gone
from drivers.generic import GenericDriver, backend_calls
from drivers.generic.backend_calls import BackendCaller

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Return the event that ends the questions which hang; it is set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def wait_for_an_answer(caller: BackendCaller) -> str:
    """Ask until the backend is not suspended any more, and return the answer."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            return caller.call("discover", lambda: "found", 5.0)
        except Failed:
            time.sleep(0.01)
    raise AssertionError("it is suspended for ever")


def test_a_backend_whose_question_hangs_is_not_asked_again_until_that_question_has_returned(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_calls, "FIRST_PAUSE_S", 0.05)
    caller, asked = BackendCaller("gpus"), []

    def hang() -> None:
        asked.append(threading.current_thread())
        released.wait()

    with pytest.raises(Failed, match=r"backend gpus: it did not answer the question health within 0.1 s"):
        caller.call("health", hang, 0.1)
    reason = caller.suspension
    time.sleep(0.1)  # the pause is over, but the question has not returned
    began = time.monotonic()
    for question in ("discover", "health", "attach"):
        with pytest.raises(Failed, match="did not answer the question health"):
            caller.call(question, hang, 30.0)
    with pytest.raises(Failed, match="did not answer the question health"):
        caller.call_if_idle("stats", hang, 30.0)
    assert time.monotonic() - began < 5 and len(asked) == 1
    assert caller.suspension == reason, "each new text would cause a new report"
    released.set()
    assert wait_for_an_answer(caller) == "found" and caller.suspension == ""


@pytest.mark.slow
def test_each_late_answer_doubles_the_pause_and_an_answer_in_time_ends_it(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    released.set()
    caller, pauses = BackendCaller("gpus"), []
    for _ in range(12):
        with pytest.raises(Failed):
            caller.call("discover", lambda: time.sleep(0.1), 0.05)
        times = [datetime.strptime(text, "%Y-%m-%d %H:%M:%S UTC") for text in re.findall(TIME, caller.suspension)]
        pauses.append((times[1] - times[0]).total_seconds())
        assert abs((times[0].replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds()) < 30
        with pytest.raises(Failed, match=re.escape(caller.suspension)):
            caller.call("discover", lambda: None, 0.05)
        caller._next_attempt_at = 0.0
        assert caller._last_call and caller._last_call.has_ended_within(10)
    assert pauses[:4] == [2, 4, 8, 16] and pauses[-1] == backend_calls.MAX_PAUSE_S
    assert wait_for_an_answer(caller) == "found"
    with pytest.raises(Failed):
        caller.call("discover", lambda: time.sleep(0.2), 0.05)
    first, second = (datetime.strptime(text, "%Y-%m-%d %H:%M:%S UTC") for text in re.findall(TIME, caller.suspension))
    assert (second - first).total_seconds() == backend_calls.FIRST_PAUSE_S


def test_a_rescan_ends_the_pause_but_not_a_question_that_still_hangs(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_calls, "FIRST_PAUSE_S", 1000.0)
    caller = BackendCaller("gpus")
    with pytest.raises(Failed):
        caller.call("health", released.wait, 0.1)
    driver = GenericDriver()
    driver._callers["gpus"] = caller
    driver.release()
    with pytest.raises(Failed, match="did not answer the question health"):
        caller.call("discover", lambda: "found", 30.0)
    released.set()
    assert caller._last_call and caller._last_call.has_ended_within(10)
    assert caller.call("discover", lambda: "found", 30.0) == "found"


def test_a_slow_load_does_not_suspend_its_backend_and_a_question_waits_for_it(released: threading.Event) -> None:
    caller = BackendCaller("gpus")
    with pytest.raises(Failed, match="stats did not return"):
        caller.call_if_idle("stats", released.wait, 0.1)
    with pytest.raises(Busy, match="stats has not returned"):
        caller.call_if_idle("stats", released.wait, 0.1)
    assert caller.suspension == ""
    threading.Timer(0.2, released.set).start()
    assert caller.call("discover", lambda: "found", 30.0) == "found"


def test_a_load_that_never_returns_suspends_the_backend_at_the_next_question(released: threading.Event) -> None:
    caller = BackendCaller("gpus")
    with pytest.raises(Failed, match="stats did not return"):
        caller.call_if_idle("stats", released.wait, 0.1)
    with pytest.raises(Failed, match="it did not answer the question stats"):
        caller.call("discover", lambda: "found", 0.1)


def test_a_question_without_time_is_not_asked_and_does_not_suspend_the_backend() -> None:
    caller = BackendCaller("gpus")
    with pytest.raises(Busy, match="no time was left for it"):
        caller.call("discover", lambda: pytest.fail("it was asked"), 0.0)
    assert caller.suspension == ""


def test_an_error_of_a_backend_is_its_answer_and_does_not_suspend_it() -> None:
    def raise_gone() -> None:
        raise Gone("no such card")

    caller = BackendCaller("gpus")
    with pytest.raises(Gone, match="no such card"):
        caller.call("health", raise_gone, 5.0)
    with pytest.raises(Failed, match="it raised ZeroDivisionError"):
        caller.call("health", lambda: 1 / 0, 5.0)
    assert caller.suspension == "" and caller.call("health", lambda: 7, 5.0) == 7
