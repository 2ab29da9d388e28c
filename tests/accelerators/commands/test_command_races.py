"""Test promise S1 under concurrency: of a bind and a command for one device at the same moment, one succeeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from django.db import connection

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AcceleratorRequest, AttachHandle, Command, Device
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from accelerators.workflows import command_endings
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.requests import NOVA, create_profiles, offer_devices

pytestmark = [pytest.mark.system, pytest.mark.django_db(transaction=True)]
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
ROUNDS = 100
PROVIDER = str(uuid4())


class ThreadPair:
    """Two threads that start at the same moment."""

    def __init__(self) -> None:
        self._threads, self._start = ThreadPoolExecutor(2), threading.Barrier(2)

    def race(self, *works: Callable[[], object]) -> list[RefusedError | None]:
        """Run these functions at the same moment; return the refusal of each, or None."""
        return [future.result(30) for future in [self._threads.submit(self._run, work) for work in works]]

    def _run(self, work: Callable[[], object]) -> RefusedError | None:
        self._start.wait(30)
        try:
            work()
        except RefusedError as refused:
            return refused
        return None

    def close(self) -> None:
        """Close the threads and their database connections."""
        for future in [self._threads.submit(self._close) for _ in range(2)]:
            future.result(30)
        self._threads.shutdown()

    def _close(self) -> None:
        self._start.wait(30)
        connection.close()


@pytest.fixture
def pair() -> Iterator[ThreadPair]:
    made = ThreadPair()
    yield made
    made.close()


@pytest.fixture
def device() -> Device:
    """Return a ready card with two handles, and create the profiles `plain`, `f` and `g`."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=2, acts="partition program reset")))
    offer_devices(PROVIDER)
    create_profiles(plain={}, f={"accel:function_id": "f"}, g={"accel:function_id": "g"})
    return Device.objects.get()


def prepare_bind(profile: str) -> Callable[[], None]:
    """Create a request and return a function that binds it."""
    (uuid,) = binding.create_requests(profile, NOVA)
    return lambda: binding.bind_requests([BindSpec(uuid, "cmp1", PROVIDER, str(uuid4()))], NOVA)


def free_everything() -> None:
    """Delete all bound requests and end all open commands."""
    requests = AcceleratorRequest.objects.exclude(state__in=["Initial", "Unbound"])
    binding.delete_requests([str(uuid) for uuid in requests.values_list("uuid", flat=True)], NOVA)
    for number in Command.objects.filter(COMMAND_IS_OPEN, state="preparing").values_list("id", flat=True):
        command_queue.mark_image_failed(number, "no such image")
    open_ones = Command.objects.filter(COMMAND_IS_OPEN, state="queued").values_list("host", "id")
    command_queue.store_answers([CommandAnswer(host, number, "succeeded") for host, number in open_ones])
    command_endings.end_answered_commands()
    assert not Command.objects.filter(COMMAND_IS_OPEN).exists()


ORDER_BY_OP: dict[str, Callable[[Device], object]] = {
    "partition": lambda device: command_queue.order_device_command(
        "partition", device.uuid, OLGA, layout={"parts": "4"}
    ),
    "program": lambda device: command_queue.order_device_command("program", device.uuid, OLGA, image=uuid4()),
}


@pytest.mark.parametrize("profile", ["plain", "f"])
@pytest.mark.parametrize("op", sorted(ORDER_BY_OP))
def test_S1_of_a_racing_bind_and_command_exactly_one_gets_the_device(
    device: Device, pair: ThreadPair, op: str, profile: str
) -> None:
    winners = set[str]()
    for number in range(ROUNDS):
        works = [prepare_bind(profile), lambda: ORDER_BY_OP[op](device)]
        # Half the rounds submit the command first, so that each side wins some rounds.
        if number % 2:
            ordered, bound = pair.race(*reversed(works))
        else:
            bound, ordered = pair.race(*works)
        holds = AcceleratorRequest.objects.filter(attach_handle__isnull=False).count()
        alone = Command.objects.filter(COMMAND_IS_OPEN, op=op).count()
        assert (holds, alone) in ((1, 0), (0, 1))
        assert bound is None or bound.reason in (RefusalReason.NONE_FREE, RefusalReason.UNAVAILABLE), bound
        assert ordered is None or ordered.reason in (RefusalReason.IN_USE, RefusalReason.CONFLICT), ordered
        assert (bound is None, ordered is None) == (holds == 1, alone == 1), (bound, ordered)
        winners.add("command" if alone else "bind")
        free_everything()
    assert winners == {"bind", "command"}


@pytest.mark.parametrize(("one", "other"), [("f", "f"), ("f", "g"), ("f", "plain")])
def test_S1_of_two_racing_binds_that_program_exactly_one_gets_the_device(
    device: Device, pair: ThreadPair, one: str, other: str
) -> None:
    for _ in range(ROUNDS):
        ends = pair.race(prepare_bind(one), prepare_bind(other))
        alone = Command.objects.filter(COMMAND_IS_OPEN, exclusive=True).count()
        holders = AcceleratorRequest.objects.filter(attach_handle__isnull=False).count()
        assert (holders, alone) in ((1, 1), (1, 0)), ends
        assert alone == 1 or other == "plain"
        assert [end.reason for end in ends if end] == [RefusalReason.NONE_FREE]
        free_everything()


def test_a_concurrent_bind_and_merge_do_not_deadlock(device: Device, pair: ThreadPair) -> None:
    """A bind whose handles the host creates inserts a row that refers to rows which the merge has locked."""
    with conductor.writing():
        AttachHandle.objects.update(attach_type="MDEV")
    reported = make_card(1, handles=2, acts="partition program reset")
    parts = tuple(type(p)(p.name, p.num_accelerators, p.attributes, p.handles, "other") for p in reported.deployables)
    for seq in range(2, 2 + ROUNDS):
        changed = make_card(1, handles=2, acts="partition", status=("ok", "degraded")[seq % 2], deployables=parts)
        ends = pair.race(
            prepare_bind("plain"),
            lambda n=seq, seen=changed: apply_report(device.host, make_driver_report(seen), seq=n),
        )
        assert ends == [None, None]
        free_everything()
