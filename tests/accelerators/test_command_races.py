"""Promise S1 under fire: a bind and an order for the same device at the same moment; exactly one of them has it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from django.db import connection

from accelerators import conductor
from accelerators.commands import placing
from accelerators.commands.placing import CommandAnswer
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AcceleratorRequest, AttachHandle, Command, Deployable, Device, DeviceProfile
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from accelerators.workflows import command_results
from tests.support.reports import a_host, answer, apply, card

pytestmark = [pytest.mark.system, pytest.mark.django_db(transaction=True)]
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
NOVA = Caller("nova", "n", frozenset({"member"}), "p1", service=True)
ROUNDS = 100
PROVIDER = str(uuid4())


class Pair:
    """Two threads that begin at the same moment."""

    def __init__(self) -> None:
        self._threads, self._start = ThreadPoolExecutor(2), threading.Barrier(2)

    def race(self, *works: Callable[[], object]) -> list[RefusedError | None]:
        """How each ended."""
        return [future.result(30) for future in [self._threads.submit(self._run, work) for work in works]]

    def _run(self, work: Callable[[], object]) -> RefusedError | None:
        self._start.wait(30)
        try:
            work()
        except RefusedError as refused:
            return refused
        return None

    def end(self) -> None:
        """Give the threads' connections back."""
        for future in [self._threads.submit(self._close) for _ in range(2)]:
            future.result(30)
        self._threads.shutdown()

    def _close(self) -> None:
        self._start.wait(30)
        connection.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.end()


@pytest.fixture
def device() -> Device:
    """A ready card with two handles."""
    apply(a_host(), answer(card(1, handles=2, acts="partition program reset")))
    with conductor.writing():
        Device.objects.update(state="ready")
        Deployable.objects.update(rp_uuid=PROVIDER)
        for name, more in (("plain", {}), ("f", {"accel:function_id": "f"}), ("g", {"accel:function_id": "g"})):
            DeviceProfile.objects.create(name=name, groups=[{"resources:FPGA": "1"} | more])
    return Device.objects.get()


def requested(profile: str) -> Callable[[], None]:
    """A bind of a new request."""
    (uuid,) = binding.create_requests(profile, NOVA)
    return lambda: binding.bind_requests([BindSpec(uuid, "cmp1", PROVIDER, str(uuid4()))], NOVA)


def finish() -> None:
    """All is free again."""
    requests = AcceleratorRequest.objects.exclude(state__in=["Initial", "Unbound"])
    binding.delete_requests([str(uuid) for uuid in requests.values_list("uuid", flat=True)], NOVA)
    for number in Command.objects.filter(COMMAND_IS_OPEN, state="preparing").values_list("id", flat=True):
        placing.mark_image_failed(number, "no such image")
    open_ones = Command.objects.filter(COMMAND_IS_OPEN, state="queued").values_list("host", "id")
    placing.store_answers([CommandAnswer(host, number, "succeeded") for host, number in open_ones])
    command_results.end_answered_commands()
    assert not Command.objects.filter(COMMAND_IS_OPEN).exists()


ORDERS: dict[str, Callable[[Device], object]] = {
    "partition": lambda device: placing.order_device_command("partition", device.uuid, OLGA, layout={"parts": "4"}),
    "program": lambda device: placing.order_device_command("program", device.uuid, OLGA, image=uuid4()),
}


@pytest.mark.parametrize("profile", ["plain", "f"])
@pytest.mark.parametrize("op", sorted(ORDERS))
def test_S1_a_bind_and_an_order_never_both_have_the_device(device: Device, pair: Pair, op: str, profile: str) -> None:
    won = [0, 0]
    for _ in range(ROUNDS):
        bound, ordered = pair.race(requested(profile), lambda: ORDERS[op](device))
        holds = AcceleratorRequest.objects.filter(attach_handle__isnull=False).count()
        alone = Command.objects.filter(COMMAND_IS_OPEN, op=op).count()
        assert (holds, alone) in ((1, 0), (0, 1))
        assert bound is None or bound.reason in (RefusalReason.NONE_FREE, RefusalReason.AWAY), bound
        assert ordered is None or ordered.reason in (RefusalReason.HELD, RefusalReason.CONFLICT), ordered
        won[alone] += 1
        finish()
    assert sum(won) == ROUNDS


@pytest.mark.parametrize(("one", "other"), [("f", "f"), ("f", "g"), ("f", "plain")])
def test_S1_of_two_binds_one_has_the_device_it_programs(device: Device, pair: Pair, one: str, other: str) -> None:
    for _ in range(ROUNDS):
        ends = pair.race(requested(one), requested(other))
        alone = Command.objects.filter(COMMAND_IS_OPEN, exclusive=True).count()
        holders = AcceleratorRequest.objects.filter(attach_handle__isnull=False).count()
        assert (holders, alone) in ((1, 1), (1, 0)), ends
        assert alone == 1 or other == "plain"
        assert [end.reason for end in ends if end] == [RefusalReason.NONE_FREE]
        finish()


def test_no_bind_and_no_merge_wait_for_each_other_in_a_circle(device: Device, pair: Pair) -> None:
    """A bind whose handles are made on the host inserts a row that refers to what a merge has locked."""
    with conductor.writing():
        AttachHandle.objects.update(attach_type="MDEV")
    reported = card(1, handles=2, acts="partition program reset")
    parts = tuple(type(p)(p.name, p.num_accelerators, p.attributes, p.handles, "other") for p in reported.deployables)
    for seq in range(2, 2 + ROUNDS):
        changed = card(1, handles=2, acts="partition", status=("ok", "degraded")[seq % 2], deployables=parts)
        ends = pair.race(requested("plain"), lambda n=seq, seen=changed: apply(device.host, answer(seen), seq=n))
        assert ends == [None, None]
        finish()
