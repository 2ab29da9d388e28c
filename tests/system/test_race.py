"""Promises S1 and S2 under fire: two processes of 25 threads fight for the last handle, again and again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from uuid import uuid4

import pytest
from django.db import connection

from accelerators import binding, conductor
from accelerators.models import AcceleratorRequest, Deployable, Device, DeviceProfile, Event
from tests.support.reports import a_host, answer, apply, card
from tests.system.fighter import NOVA

pytestmark = [pytest.mark.system, pytest.mark.django_db(transaction=True)]

ROUNDS, PROCESSES, THREADS = 300, 2, 25
BACK = """UPDATE accelerators_acceleratorrequest SET state = 'Initial', hostname = NULL, instance_uuid = NULL,
device_rp_uuid = NULL, deployable_id = NULL, attach_handle_id = NULL, fault = ''"""


@pytest.fixture
def fighters() -> Iterator[list[subprocess.Popen[str]]]:
    provider = str(uuid4())
    apply(a_host(), answer(card(1)))
    with conductor.writing():
        Device.objects.update(state="ready")
        Deployable.objects.update(rp_uuid=provider)
        DeviceProfile.objects.create(name="p", groups=[{"resources:FPGA": str(THREADS)}])
    command = [sys.executable, "-m", "tests.system.fighter", str(connection.settings_dict["NAME"]), provider]
    parent = os.environ | {"CYBORG_PARENT": str(os.getpid())}
    started = [
        subprocess.Popen(
            [*command, *binding.create("p", NOVA)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=parent
        )
        for _ in range(PROCESSES)
    ]
    yield started
    for process in started:
        process.communicate(timeout=30)


def test_S2_the_last_handle_has_one_winner_each_time(fighters: list[subprocess.Popen[str]]) -> None:
    for _ in range(ROUNDS):
        for process in fighters:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        won = [uuid for process in fighters for uuid in (process.stdout.readline() if process.stdout else "").split()]
        held = AcceleratorRequest.objects.filter(attach_handle__isnull=False)
        assert [str(uuid) for uuid in held.values_list("uuid", flat=True)] == won
        assert len(won) == 1
        with conductor.writing(), connection.cursor() as cursor:
            cursor.execute(BACK)
    assert Event.objects.filter(action="request.bound").count() == ROUNDS
    assert Event.objects.filter(action="request.bind_failed").count() == ROUNDS * (PROCESSES * THREADS - 1)
