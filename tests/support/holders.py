"""A holder check whose answers a test gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from accelerators import safety
from accelerators.models import Device
from accelerators.safety import HolderCheck, HolderCheckResult
from tests.support.callguard import refuse_call_in_transaction


def answer_each(answer: Callable[[Device], HolderCheckResult]) -> HolderCheck:
    """Return a holder check that calls `answer` for one device after the other, until its time is over."""

    def load_questions(devices: Collection[Device]) -> Mapping[int, str]:
        return {device.pk: str(device.uuid) for device in devices}

    def ask(questions: Mapping[int, Any], seconds: float) -> Mapping[int, HolderCheckResult]:
        refuse_call_in_transaction("a holder check")
        end, results = time.monotonic() + seconds, {}
        for pk in questions:
            if time.monotonic() < end:
                results[pk] = answer(Device.objects.get(pk=pk))
        return results

    return HolderCheck(load_questions, ask)


@contextmanager
def slow_holder_checks(patch: pytest.MonkeyPatch) -> Iterator[list[Device]]:
    """Let one answer of Placement take longer than all holder checks may; yield the devices that are asked about.

    The test does not wait: the clock of the checks goes on with each answer only.
    """
    asked: list[Device] = []
    clock = SimpleNamespace(monotonic=lambda: len(asked) * (safety.HOLDER_CHECKS_TIMEOUT_S + 1.0))
    patch.setattr(safety, "time", clock)
    patch.setitem(globals(), "time", clock)

    def check(one: Device) -> HolderCheckResult:
        asked.append(one)
        return HolderCheckResult()

    with safety.HOLDER_CHECKS.replaced("placement", answer_each(check)):
        yield asked
