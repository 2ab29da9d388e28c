"""Load is the least that a driver says: whatever happens over it costs samples, and neither devices nor the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from drivers.errors import Failed
from drivers.inventory import Sample
from drivers.isolation.runner import DriverProcess
from drivers.plan import Ask
from tests.drivers.actor import actor
from tests.drivers.test_protocol import tell
from tests.drivers.test_runner import script

GOOD, ALSO = "(Sample(key, 'power_watts', 1.5),)", "[Sample(key, 'power_watts', 2)]"
HALF = (
    "(Sample(key, 'power_watts', float('nan')), Sample(key, 'x', float('-inf')), Sample(key, 'memory_used_bytes', 7))"
)
BAD = {
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


def asks(*keys: str) -> list[Ask]:
    return [Ask(key) for key in keys]


def running(process: DriverProcess, story: Callable[[], Awaitable[None]]) -> None:
    """Tell it of a driver that has looked once."""

    async def whole() -> None:
        assert await process.samples(asks(GOOD)) == (), "nothing is started for load"
        assert (await process.discover()).error == ""
        await story()

    tell(process, whole)


def test_one_bad_device_costs_only_its_own_load_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    process = actor()

    async def story() -> None:
        pid, before = process.pid, process.manifest
        for _ in range(2):
            told = await process.samples(asks(GOOD, *BAD, HALF, ALSO))
            assert set(told) == {
                Sample(GOOD, "power_watts", 1.5),
                Sample(HALF, "memory_used_bytes", 7.0),
                Sample(ALSO, "power_watts", 2.0),
            }
        assert (process.pid, process.manifest) == (pid, before)

    running(process, story)
    said = [record.getMessage() for record in caplog.records if "the load of device" in record.getMessage()]
    assert len(said) == len(BAD)
    for key, reason in BAD.items():
        assert any(key[:20] in line and reason in line for line in said), (reason, said)


@pytest.mark.parametrize("does", [HALF, *BAD, "time.sleep(600)"])
def test_how_a_device_is_can_be_said_whatever_its_load_does(does: str) -> None:
    process = actor(deadline_s=3.0 if "sleep" in does else 10.0)

    async def story() -> None:
        pid = process.pid
        told = await process.health(Ask(does, layout={"is": "ok"}))
        assert told.status == "ok" and told.samples in ((), (Sample(does, "memory_used_bytes", 7.0),))
        assert (await process.health(Ask(GOOD, layout={"is": "ok"}))).samples == (Sample(GOOD, "power_watts", 1.5),)
        assert process.pid == pid and not process.quarantined

    running(process, story)


def test_a_device_that_hangs_is_left_out_and_everything_else_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivers.isolation.runner.SAMPLES_S", 1.0)
    process = actor()

    async def story() -> None:
        pid, three = process.pid, asks(GOOD, "time.sleep(600)", ALSO)
        assert await process.samples(three) == (Sample(GOOD, "power_watts", 1.5),)
        assert (await process.discover()).error == ""
        assert {sample.value for sample in await process.samples(three)} == {1.5, 2.0}
        assert process.pid == pid and not process.quarantined

    running(process, story)


def test_each_device_of_a_slow_driver_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivers.isolation.runner.SAMPLES_S", 0.5)
    process = actor()

    async def story() -> None:
        slow = [f"time.sleep(0.2) or (Sample(key, 'n', {n}.0),)" for n in range(3)]
        seen: set[float] = set()
        async with asyncio.timeout(30):
            while seen != {0.0, 1.0, 2.0}:
                try:
                    told = await process.samples(asks(*slow))
                except Failed:  # on a busy machine an answer may come too late
                    continue
                assert len(told) < 3
                seen |= {sample.value for sample in told}

    running(process, story)


def test_a_busy_driver_is_not_waited_for() -> None:
    process = actor()

    async def story() -> None:
        plan = asyncio.create_task(process.plan("install", Ask("k", layout={"do": "time.sleep(0.5) or Plan()"})))
        await asyncio.sleep(0)
        assert await process.samples(asks(GOOD)) == ()
        assert not plan.done()
        await plan
        assert await process.samples(asks(GOOD)) != ()

    running(process, story)


LATE = """
if question["call"] == "samples":
    time.sleep({})
    say(id=question["id"], load={{}})
else:
    ok(question)
"""


@pytest.mark.parametrize(
    ("body", "reason", "same"),
    [
        (LATE.format(0.6), "did not return its load within 0.3 s", True),
        (LATE.format(600), "did not return its load within 0.3 s", False),
        ("os._exit(3) if question['call'] == 'samples' else ok(question)", "exit status 3", False),
        ("print('x', flush=True) if question['call'] == 'samples' else ok(question)", "answer is invalid", False),
        ("say(id=question['id'], plan={}) if question['call'] == 'samples' else ok(question)", "neither a load", False),
    ],
)
def test_a_process_that_breaks_over_its_load_loses_nothing_by_it(
    monkeypatch: pytest.MonkeyPatch, body: str, reason: str, same: bool
) -> None:
    monkeypatch.setattr("drivers.isolation.runner.SAMPLES_S", 0.3)
    monkeypatch.setattr("drivers.isolation.runner.CATCH_UP_S", 5.0 if same else 0.3)
    monkeypatch.setattr("drivers.isolation.runner.BREAKS", 2)
    process = script(body)

    async def story() -> None:
        for _ in range(2):
            pid = process.pid
            with pytest.raises(Failed, match=reason):
                await process.samples(asks(GOOD))
            assert (await process.discover()).error == "", "the next call is answered at once"
            assert (process.pid == pid) is same
        assert not process.quarantined

    running(process, story)
