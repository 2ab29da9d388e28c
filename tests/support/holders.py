"""A holder check whose answers a test gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

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
