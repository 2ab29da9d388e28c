"""Tests that a driver with bad, slow or hanging samples loses only samples: its devices and its process stay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from drivers.errors import Failed
from drivers.inventory import Sample
from drivers.isolation.runner import DriverProcess
from drivers.plan import Ask
from tests.drivers.isolation.scripted_driver import start_actor
from tests.drivers.isolation.test_protocol import run_story
from tests.drivers.isolation.test_runner import scripted_process

pytestmark = pytest.mark.slow

GOOD_LOAD, GOOD_LOAD_AS_LIST = "(Sample(key, 'power_watts', 1.5),)", "[Sample(key, 'power_watts', 2)]"
PARTLY_GOOD_LOAD = (
    "(Sample(key, 'power_watts', float('nan')), Sample(key, 'x', float('-inf')), Sample(key, 'memory_used_bytes', 7))"
)
BAD_LOADS = {
    "throw(RuntimeError('no card'))": "it raised RuntimeError: no card",
    "throw(Gone('pulled out'))": "pulled out",
    "None": "TypeError",
    "(None,)": "AttributeError",
    "(Sample('other', 'x', 1.0),)": "samples of another device",
    "(Sample(key, 'a b', 1.0),)": "describes its load wrongly",
    "(Sample(key, 'x', 'much'),)": "TypeError",
    "(Sample(key, 'x', 10 ** 400),)": "OverflowError",
    "tuple(Sample(key, f'x{n}', 1.0) for n in range(65))": "65 samples of this device, more than 64",
    "throw(Gone('a\\0b\\ud800'))": "a b?",
}


def make_asks(*keys: str) -> list[Ask]:
    return [Ask(key) for key in keys]


def run_after_discovery(process: DriverProcess, story: Callable[[], Awaitable[None]]) -> None:
    """Run the story after the driver has been asked for its devices once."""

    async def whole() -> None:
        assert await process.samples(make_asks(GOOD_LOAD)) == (), "nothing is started for load"
        assert (await process.discover()).error == ""
        await story()

    run_story(process, whole)


def test_invalid_samples_of_a_device_are_dropped_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    process = start_actor()

    async def story() -> None:
        pid, before = process.pid, process.manifest
        for _ in range(2):
            told = await process.samples(make_asks(GOOD_LOAD, *BAD_LOADS, PARTLY_GOOD_LOAD, GOOD_LOAD_AS_LIST))
            assert set(told) == {
                Sample(GOOD_LOAD, "power_watts", 1.5),
                Sample(PARTLY_GOOD_LOAD, "memory_used_bytes", 7.0),
                Sample(GOOD_LOAD_AS_LIST, "power_watts", 2.0),
            }
        assert (process.pid, process.manifest) == (pid, before)

    run_after_discovery(process, story)
    said = [record.getMessage() for record in caplog.records if "the load of device" in record.getMessage()]
    assert len(said) == len(BAD_LOADS)
    for key, reason in BAD_LOADS.items():
        assert any(key[:20] in line and reason in line for line in said), (reason, said)


@pytest.mark.parametrize(
    ("expressions", "deadline_s"),
    [((PARTLY_GOOD_LOAD, *BAD_LOADS), 10.0), (("time.sleep(600)",), 3.0)],
    ids=["fails", "hangs"],
)
def test_health_is_answered_even_if_reading_the_load_fails_or_hangs(
    expressions: tuple[str, ...], deadline_s: float
) -> None:
    process = start_actor(deadline_s=deadline_s)

    async def story() -> None:
        pid = process.pid
        for does in expressions:
            told = await process.health(Ask(does, layout={"is": "ok"}))
            assert told.status == "ok", does
            assert told.samples in ((), (Sample(does, "memory_used_bytes", 7.0),)), does
            assert (await process.health(Ask(GOOD_LOAD, layout={"is": "ok"}))).samples == (
                Sample(GOOD_LOAD, "power_watts", 1.5),
            ), does
        assert process.pid == pid and not process.is_quarantined

    run_after_discovery(process, story)


def test_a_device_whose_load_hangs_is_left_out_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivers.isolation.runner.SAMPLES_S", 1.0)
    process = start_actor()

    async def story() -> None:
        pid, three = process.pid, make_asks(GOOD_LOAD, "time.sleep(600)", GOOD_LOAD_AS_LIST)
        assert await process.samples(three) == (Sample(GOOD_LOAD, "power_watts", 1.5),)
        assert (await process.discover()).error == ""
        assert {sample.value for sample in await process.samples(three)} == {1.5, 2.0}
        assert process.pid == pid and not process.is_quarantined

    run_after_discovery(process, story)


def test_every_device_of_a_slow_driver_is_sampled_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivers.isolation.runner.SAMPLES_S", 0.5)
    process = start_actor()

    async def story() -> None:
        slow = [f"time.sleep(0.2) or (Sample(key, 'n', {n}.0),)" for n in range(3)]
        seen: set[float] = set()
        async with asyncio.timeout(30):
            while seen != {0.0, 1.0, 2.0}:
                try:
                    told = await process.samples(make_asks(*slow))
                except Failed:  # On a busy machine the answer may come too late.
                    continue
                assert len(told) < 3
                seen |= {sample.value for sample in told}

    run_after_discovery(process, story)


def test_samples_of_a_busy_driver_are_empty_at_once() -> None:
    process = start_actor()

    async def story() -> None:
        plan = asyncio.create_task(process.plan("install", Ask("k", layout={"do": "time.sleep(0.5) or Plan()"})))
        await asyncio.sleep(0)
        assert await process.samples(make_asks(GOOD_LOAD)) == ()
        assert not plan.done()
        await plan
        assert await process.samples(make_asks(GOOD_LOAD)) != ()

    run_after_discovery(process, story)


LATE_SCRIPT = """
if question["call"] == "samples":
    time.sleep({})
    say(id=question["id"], load={{}})
else:
    ok(question)
"""


@pytest.mark.parametrize(
    ("body", "reason", "same"),
    [
        (LATE_SCRIPT.format(0.6), "did not return its load within 0.3 s", True),
        (LATE_SCRIPT.format(600), "did not return its load within 0.3 s", False),
        ("os._exit(3) if question['call'] == 'samples' else ok(question)", "exit status 3", False),
        ("print('x', flush=True) if question['call'] == 'samples' else ok(question)", "answer is invalid", False),
        ("say(id=question['id'], plan={}) if question['call'] == 'samples' else ok(question)", "neither a load", False),
    ],
)
def test_a_process_that_breaks_while_sampling_answers_the_next_call_and_is_not_quarantined(
    monkeypatch: pytest.MonkeyPatch, body: str, reason: str, same: bool
) -> None:
    monkeypatch.setattr("drivers.isolation.runner.SAMPLES_S", 0.3)
    monkeypatch.setattr("drivers.isolation.runner.CATCH_UP_S", 5.0 if same else 0.3)
    monkeypatch.setattr("drivers.isolation.runner.MAX_FAILURES", 2)
    process = scripted_process(body)

    async def story() -> None:
        for _ in range(2):
            pid = process.pid
            with pytest.raises(Failed, match=reason):
                await process.samples(make_asks(GOOD_LOAD))
            assert (await process.discover()).error == "", "the next call is answered at once"
            assert (process.pid == pid) is same
        assert not process.is_quarantined

    run_after_discovery(process, story)
