"""Test promises S1 and S2: threads of two processes try to bind the last handle at the same moment, a thousand times.

Threads make a round slower, so only few threads of each process take part in most rounds, and all of them in every
CROWDED_EVERY-th round. In the long version all of them take part in every round.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest
from django.db import connection

from accelerators import conductor
from accelerators.models import AcceleratorRequest, Deployable, Device, DeviceProfile, Event
from accelerators.requests import binding
from tests.support.long import scaled
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.system.race_process import NOVA_CALLER

pytestmark = [pytest.mark.system, pytest.mark.django_db(transaction=True)]

ROUNDS, PROCESSES, THREADS = 1000, 2, 25
FEW_THREADS = 3
"""How many threads of each process take part in a round that is not crowded."""
CROWDED_EVERY = scaled(40, 1)
RESET_REQUESTS = """UPDATE accelerators_acceleratorrequest SET state = 'Initial', hostname = NULL, instance_uuid = NULL,
device_rp_uuid = NULL, deployable_id = NULL, attach_handle_id = NULL, fault = '' WHERE state <> 'Initial'"""


@pytest.fixture
def fighters() -> Iterator[list[subprocess.Popen[str]]]:
    provider = str(uuid4())
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    with conductor.writing():
        Device.objects.update(state="ready")
        Deployable.objects.update(rp_uuid=provider)
        DeviceProfile.objects.create(name="p", groups=[{"resources:FPGA": str(THREADS)}])
    command = [sys.executable, "-m", "tests.system.race_process", str(connection.settings_dict["NAME"]), provider]
    parent = os.environ | {"CYBORG_PARENT": str(os.getpid())}
    started = [
        subprocess.Popen(
            [*command, *binding.create_requests("p", NOVA_CALLER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=parent,
        )
        for _ in range(PROCESSES)
    ]
    yield started
    for process in started:
        process.communicate(timeout=30)


def test_S2_of_many_concurrent_binds_of_the_last_handle_exactly_one_succeeds(
    fighters: list[subprocess.Popen[str]],
) -> None:
    begin, binds = time.monotonic(), 0
    for number in range(ROUNDS):
        rivals = FEW_THREADS if number % CROWDED_EVERY else THREADS
        for process in fighters:
            assert process.stdin
            process.stdin.write(f"{rivals}\n")
            process.stdin.flush()
        won = [uuid for process in fighters for uuid in (process.stdout.readline() if process.stdout else "").split()]
        held = AcceleratorRequest.objects.filter(attach_handle__isnull=False)
        assert [str(uuid) for uuid in held.values_list("uuid", flat=True)] == won
        assert len(won) == 1
        binds += PROCESSES * rivals
        with conductor.writing(), connection.cursor() as cursor:
            cursor.execute(RESET_REQUESTS)
    print(f"{ROUNDS} rounds of {binds} binds, {ROUNDS / (time.monotonic() - begin):.1f} rounds/s")
    assert Event.objects.filter(action="request.bound").count() == ROUNDS
    assert Event.objects.filter(action="request.bind_failed").count() == binds - ROUNDS
