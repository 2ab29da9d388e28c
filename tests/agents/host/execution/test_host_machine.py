"""Tests of blocking work that many threads share: one runs at a time, and no result is older than the question."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from agents.host.execution.host_machine import HostMachine
from drivers.errors import Timeout
from drivers.isolation.threads import SharedWork
from drivers.machine import OpenNodes

GUARD_S = 20.0


class BlockedWork:
    """Work that waits until it is let go and then returns the number of its run; `threads` are those that began it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.may_end = threading.Event()

    def __call__(self) -> int:
        self.threads.append(threading.current_thread())
        number = len(self.threads)
        self.may_end.wait(GUARD_S)
        return number


def wait_for_runs(work: BlockedWork, count: int) -> None:
    """Wait until this many runs were begun."""
    end = time.monotonic() + GUARD_S
    while len(work.threads) < count and time.monotonic() < end:
        time.sleep(0.005)
    assert len(work.threads) == count


def test_only_one_thread_hangs_however_often_the_host_is_asked() -> None:
    work = BlockedWork()
    shared = SharedWork(work)
    for _ in range(5):
        with pytest.raises(Timeout, match=r"more than 0\.05 s"):
            shared.get_result(0.05)
    assert len(work.threads) == 1 and work.threads[0].daemon
    work.may_end.set()
    work.threads[0].join(GUARD_S)
    assert shared.get_result(GUARD_S) == 2, "the run that hung says nothing about a later question"


def test_S3_those_who_ask_while_a_look_runs_share_the_next_one_because_it_may_have_missed_what_they_ask_about() -> None:
    work = BlockedWork()
    shared = SharedWork(work)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(shared.get_result, GUARD_S)
        wait_for_runs(work, 1)
        later = [pool.submit(shared.get_result, GUARD_S) for _ in range(8)]
        time.sleep(0.2)  # they wait by now
        assert len(work.threads) == 1
        work.may_end.set()
        assert first.result(GUARD_S) == 1
        assert all(one.result(GUARD_S) > 1 for one in later)
    assert len(work.threads) < 9, "they share runs"


def test_each_question_after_the_end_of_a_look_gets_a_new_one() -> None:
    looks = [OpenNodes(), OpenNodes({"b259:0": ("osd",)})]
    machine = HostMachine("n", SharedWork(lambda: looks.pop(0)), state_root="/state")
    assert [machine.list_open_nodes().users for _ in range(2)] == [{}, {"b259:0": ("osd",)}]


def test_an_error_of_a_look_is_raised_and_the_next_question_looks_again() -> None:
    answers = iter([OSError("broken"), OpenNodes()])

    def look() -> OpenNodes:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    shared = SharedWork(look)
    with pytest.raises(OSError, match="broken"):
        shared.get_result()
    assert shared.get_result() == OpenNodes()
