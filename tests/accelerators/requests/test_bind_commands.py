"""Test binds that need a command: handles that the host creates, devices that are programmed first, and the detach."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models import Model

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Attribute,
    Command,
    Deployable,
    Device,
    DeviceProfile,
    Event,
    Intent,
    ReleasedHandle,
)
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.requests import binding, binding_sql, candidates
from accelerators.requests.binding import BindSpec
from accelerators.workflows import command_endings
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.requests import NOVA, answer_commands, bind_new_requests, create_profiles, offer_devices

pytestmark = pytest.mark.django_db
PROVIDER, IMAGE = str(uuid4()), str(uuid4())
ADDER_IMAGE = {"id": IMAGE, "size": 3, "sha256": "a" * 64, "properties": {"accel:function_id": "adder"}}


@pytest.fixture
def handle(db: None) -> AttachHandle:
    """Return the first of three handles of a ready card; the host creates such a handle when it is bound."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=3)))
    offer_devices(PROVIDER)
    create_profiles(plain={}, adder={"accel:function_id": "adder"}, bits={"accel:bitstream_id": IMAGE})
    with conductor.writing():
        AttachHandle.objects.update(attach_type="MDEV")
        DeviceProfile.objects.create(name="pair", groups=[{"resources:FPGA": "2", "accel:function_id": "adder"}])
    return AttachHandle.objects.order_by("id")[0]


@contextmanager
def lock_all_rows(model: type[Model]) -> Iterator[None]:
    """Hold the locks of all rows of this table in another transaction until the block ends."""
    locked, over = threading.Event(), threading.Event()

    def others() -> None:
        with transaction.atomic():
            list(model._default_manager.select_for_update())
            locked.set()
            over.wait(5)
        connection.close()

    thread = threading.Thread(target=others, daemon=True)
    thread.start()
    assert locked.wait(10)
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def hold_handle(handle: AttachHandle) -> None:
    """Create a bound request that holds the handle."""
    AcceleratorRequest.objects.create(
        project_id="p1",
        state="Bound",
        profile=DeviceProfile.objects.get(name="plain"),
        group={},
        deployable=handle.deployable,
        attach_handle=handle,
    )


def make_handles_pci() -> None:
    """Make the card's handles PCI functions, which need no command because libvirt attaches them."""
    with conductor.writing():
        AttachHandle.objects.update(attach_type="PCI")


def create_and_bind(profile: str = "plain", instance: str = "") -> list[AcceleratorRequest]:
    """Create the requests of a profile and bind them to one instance; return them."""
    return bind_new_requests(profile, PROVIDER, instance)


def begin_programming(profile: str) -> tuple[list[AcceleratorRequest], Command]:
    """Make the handles PCI functions, and bind requests that need an image, which is ready at once.

    Return the requests and the command that programs the card for them.
    """
    make_handles_pci()
    requests, attach = create_and_bind(profile), get_open_command("attach")
    command_queue.mark_image_ready(attach.id, ADDER_IMAGE)
    return requests, attach


def get_open_command(op: str) -> Command:
    return Command.objects.get(COMMAND_IS_OPEN, op=op)


def answer_command(command: Command, outcome: str = "succeeded", text: str = "") -> None:
    answer_commands(command, outcome=outcome, text=text)


def get_state_and_fault(request: AcceleratorRequest) -> tuple[str, str]:
    request.refresh_from_db()
    return request.state, request.fault


def test_bind_orders_an_attach_and_unbind_orders_the_matching_detach(handle: AttachHandle) -> None:
    (request,) = create_and_bind()
    assert get_state_and_fault(request) == ("BindStarted", "")
    attach = get_open_command("attach")
    assert attach.arguments == {
        "driver": "test_driver",
        "key": "pci:0000:01:00.0",
        "deployable": "cmp1_0000:01:00.0",
        "handle": {"attach_type": "MDEV", "info": handle.attach_info},
        "uuid": str(handle.uuid),
        "consumer": str(request.instance_uuid),
    }
    assert (attach.request, attach.exclusive, attach.actor) == (request.uuid, False, "nova")
    assert attach.end_by < request.deadline, "its end tells the request why"
    answer_command(attach)
    assert get_state_and_fault(request) == ("Bound", "")
    event = Event.objects.filter(subject=request.uuid).order_by("-id").first()
    assert (event.action, event.source, event.actor) == ("request.bound", "agent", "commands")
    before, after = event.changes.get("instance_uuid", (None, None))
    assert before == after, "the instance is the one that it was being bound for"
    binding.unbind_requests([str(request.uuid)], NOVA)
    detach = get_open_command("detach")
    assert detach.arguments == attach.arguments
    assert Device.objects.get().busy_with is None
    reason_before = Device.objects.get().state_reason
    answer_command(detach, "failed", "the mdev is busy")
    device = Device.objects.get()
    assert (device.state, device.state_reason) == ("ready", reason_before), "only the unit is kept back"
    event = Event.objects.get(action="device.not_detached", subject=device.uuid)
    assert (event.source, event.actor, event.host, event.changes) == ("agent", "cmp1", "cmp1", {})
    assert event.reason == (
        "a mediated device could not be removed yet: the mdev is busy; it is ordered again until it succeeds, and its"
        " unit is reserved meanwhile"
    )


@pytest.mark.parametrize(("profile", "seconds"), [("plain", 60), ("adder", 240)])
def test_a_bind_that_programs_has_a_longer_deadline(handle: AttachHandle, profile: str, seconds: int) -> None:
    (request,) = create_and_bind(profile)
    assert request.deadline
    assert seconds - 50 < (request.deadline - datetime.now(UTC)).total_seconds() <= seconds


@pytest.mark.parametrize("attach_type", ["MDEV", "DEV"])
def test_unbind_orders_a_detach_of_a_handle_that_the_host_has_made_of_either_type(
    handle: AttachHandle, attach_type: str
) -> None:
    with conductor.writing():
        AttachHandle.objects.filter(pk=handle.pk).update(attach_type=attach_type)
        hold_handle(handle)
    binding.delete_requests([str(AcceleratorRequest.objects.get().uuid)], NOVA)
    assert get_open_command("detach").arguments["uuid"] == str(handle.uuid)
    assert ReleasedHandle.objects.get().handle == handle


@pytest.mark.parametrize(("outcome", "given_back"), [("failed", 1), ("unknown", 1), ("refused", 0)])
def test_a_failed_attach_fails_the_bind_with_the_drivers_reason(
    handle: AttachHandle, outcome: str, given_back: int
) -> None:
    (request,) = create_and_bind()
    answer_command(get_open_command("attach"), outcome, "no more mdevs of this type")
    assert get_state_and_fault(request) == ("BindFailed", "no more mdevs of this type")
    assert request.attach_handle is None
    assert Command.objects.filter(op="detach").count() == given_back


def test_an_expired_attach_fails_the_bind_and_a_late_success_is_detached_once(handle: AttachHandle) -> None:
    (request,) = create_and_bind()
    attach = get_open_command("attach")
    past = datetime.now(UTC) - timedelta(seconds=1)
    with conductor.writing():
        Command.objects.update(start_by=past, end_by=past)
    command_endings.end_late_commands()
    assert get_state_and_fault(request) == ("BindFailed", "the agent of cmp1 did not accept it in time")
    assert not Command.objects.filter(op="detach").exists(), "as far as is known nothing was made"
    for _ in range(2):
        answer_command(attach)
    assert get_open_command("detach").arguments["consumer"] == attach.arguments["consumer"]


@pytest.mark.parametrize(("absent", "consumers"), [("uuid", []), ("consumer", [""])])
def test_an_attach_without_an_argument_needs_no_detach_or_one_without_a_consumer(
    handle: AttachHandle, absent: str, consumers: list[str]
) -> None:
    create_and_bind()
    attach = get_open_command("attach")
    with conductor.writing():
        Command.objects.update(arguments={name: value for name, value in attach.arguments.items() if name != absent})
        command_queue.order_missing_detaches([attach.pk])
    assert [command.arguments["consumer"] for command in Command.objects.filter(op="detach")] == consumers


def test_a_bind_past_its_deadline_fails_and_orders_a_detach(handle: AttachHandle) -> None:
    (request,) = create_and_bind()
    with conductor.writing():
        AcceleratorRequest.objects.update(deadline=datetime.now(UTC) - timedelta(seconds=1))
    binding.fail_overdue_binds()
    assert get_state_and_fault(request) == ("BindFailed", "nothing was heard from host cmp1 before the deadline")
    assert get_open_command("detach").request == request.uuid, "the host may have made it and never answer"
    answer_command(get_open_command("attach"))
    assert get_state_and_fault(request)[0] == "BindFailed"
    assert Command.objects.filter(op="detach").count() == 1


@pytest.mark.parametrize(
    ("reached", "reason"),
    [
        ({"state": "preparing"}, "the image for host cmp1 was not ready before the deadline"),
        (
            {"state": "taken", "taken_at": datetime.now(UTC)},
            "host cmp1 accepted the command attach, but did not answer",
        ),
        (
            {"state": "started", "taken_at": datetime.now(UTC), "answered_at": datetime.now(UTC)},
            "host cmp1 answered the command attach, but its report was not applied before the deadline",
        ),
    ],
)
def test_a_bind_past_its_deadline_says_how_far_its_command_had_come(
    handle: AttachHandle, reached: dict[str, object], reason: str
) -> None:
    (request,) = create_and_bind()
    with conductor.writing():
        Command.objects.update(**reached)
        AcceleratorRequest.objects.update(deadline=datetime.now(UTC) - timedelta(seconds=1))
    binding.fail_overdue_binds()
    state, fault = get_state_and_fault(request)
    assert state == "BindFailed" and fault.startswith(reason)


def test_a_request_bound_again_ignores_the_answer_to_its_former_attach(handle: AttachHandle) -> None:
    instance = str(uuid4())
    (request,) = create_and_bind(instance=instance)
    first = get_open_command("attach")
    binding.unbind_requests([str(request.uuid)], NOVA)
    binding.bind_requests([BindSpec(str(request.uuid), "cmp1", PROVIDER, instance)], NOVA)
    answer_command(first)
    assert get_state_and_fault(request)[0] == "BindStarted"
    answer_command(get_open_command("attach"))
    assert get_state_and_fault(request)[0] == "Bound"
    assert Command.objects.filter(op="detach").count() == 1


def test_a_device_is_programmed_once_for_all_requests_that_are_bound_together(handle: AttachHandle) -> None:
    first, second = create_and_bind("pair")
    attach = Command.objects.get()
    assert (attach.state, attach.exclusive, attach.arguments["wanted"]) == ("preparing", True, {"function_id": "adder"})
    assert Device.objects.get().busy_with == attach.uuid
    with pytest.raises(RefusedError, match="its device is busy with a command") as refused:
        create_and_bind("plain")
    assert refused.value.reason == RefusalReason.NONE_FREE
    command_queue.mark_image_ready(attach.id, ADDER_IMAGE)
    answer_command(attach)
    assert (get_state_and_fault(first)[0], get_state_and_fault(second)[0]) == ("Bound", "BindStarted"), (
        "its handle is to be made yet"
    )
    part = Deployable.objects.get()
    assert str(part.bitstream_id) == IMAGE
    trait = Attribute.objects.get(origin="conductor")
    assert "CUSTOM_FPGA_FUNCTION_ID" in trait.value and "ADDER" in trait.value
    assert Intent.objects.filter(kind="provider").exists()
    assert Device.objects.get().busy_with is None
    follower = get_open_command("attach")
    assert (follower.request, follower.exclusive, "image" in follower.arguments) == (second.uuid, False, False)
    answer_command(follower)
    assert get_state_and_fault(second) == ("Bound", "")


def test_requests_for_pci_functions_of_one_card_share_the_outcome_of_one_program_command(handle: AttachHandle) -> None:
    (first, second), attach = begin_programming("pair")
    ends_with = "the image is for another card"
    answer_command(attach, "failed", ends_with)
    assert get_state_and_fault(first) == get_state_and_fault(second) == ("BindFailed", ends_with)
    assert Command.objects.count() == 1, "nothing is made of a PCI function"
    (first, second), attach = begin_programming("pair")
    answer_command(attach)
    assert get_state_and_fault(first) == get_state_and_fault(second) == ("Bound", "")


@pytest.mark.parametrize("state", ["ready", "maintenance"])
@pytest.mark.parametrize(
    ("change", "is_free"),
    [
        (lambda handle: None, True),
        (lambda handle: Device.objects.update(busy_with=uuid4()), False),
        (lambda handle: Deployable.objects.update(missing_since=datetime.now(UTC)), False),
        (lambda handle: AttachHandle.objects.filter(pk=handle.pk).update(missing_since=datetime.now(UTC)), False),
        (lambda handle: AttachHandle.objects.filter(pk=handle.pk).update(attach_type="DEV"), False),
        (hold_handle, False),
        (lambda handle: ReleasedHandle.objects.create(handle=handle, ask_at=datetime.now(UTC)), False),
    ],
    ids=["unchanged", "busy", "deployable missing", "handle missing", "device node", "held", "released"],
)
def test_a_candidate_and_a_bind_have_the_same_free_handles(
    handle: AttachHandle, state: str, change: Callable[[AttachHandle], object], is_free: bool
) -> None:
    with conductor.writing():
        Device.objects.update(state=state)
        AttachHandle.objects.exclude(pk=handle.pk).delete()
        change(handle)
    offered_count = sum(one.free for one in candidates.find_candidates(get_or_create_host()))
    with connection.cursor() as cursor:
        cursor.execute(binding_sql.RESERVE_HANDLES, {"host": "cmp1", "rp": PROVIDER, "check_claims": False, "count": 3})
        reserved_count = len(cursor.fetchall())
    assert offered_count == reserved_count == (is_free and state == "ready")


@pytest.mark.django_db(transaction=True)
def test_a_bind_whose_handles_are_locked_by_others_is_refused_and_can_be_retried(
    handle: AttachHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "RETRY_TIMEOUT_S", 0.05)
    with (
        lock_all_rows(AttachHandle),
        pytest.raises(RefusedError, match="Others are taking the same accelerators") as refused,
    ):
        create_and_bind()
    request = AcceleratorRequest.objects.get()
    assert (refused.value.reason, request.state) == (RefusalReason.UNAVAILABLE, "Initial")
    binding.bind_requests([BindSpec(str(request.uuid), "cmp1", PROVIDER, str(uuid4()))], NOVA)
    assert get_state_and_fault(request)[0] == "BindStarted"


@pytest.mark.django_db(transaction=True)
def test_commands_that_another_transaction_is_ending_are_not_cancelled_and_not_waited_for(handle: AttachHandle) -> None:
    (request,) = create_and_bind("adder")
    with lock_all_rows(Command), conductor.writing(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout TO '1s'")
        command_queue.cancel_preparing_commands([request.uuid])
    assert get_open_command("attach").answered_at is None
    with conductor.writing():
        command_queue.cancel_preparing_commands([request.uuid])
    assert get_open_command("attach").outcome == "refused"


def test_a_bind_that_needs_two_images_on_one_device_is_refused(handle: AttachHandle) -> None:
    uuids, instance = [*binding.create_requests("adder", NOVA), *binding.create_requests("bits", NOVA)], str(uuid4())
    with pytest.raises(RefusedError, match="cannot be programmed with two images at once") as refused:
        binding.bind_requests([BindSpec(uuid, "cmp1", PROVIDER, instance) for uuid in uuids], NOVA)
    assert refused.value.reason == RefusalReason.NONE_FREE
    assert {*AcceleratorRequest.objects.values_list("state", "attach_handle")} == {("BindFailed", None)}
    assert not Command.objects.exists()


def test_a_device_with_the_wanted_bitstream_is_bound_at_once_even_if_it_is_held(handle: AttachHandle) -> None:
    (request,), attach = begin_programming("bits")
    answer_command(attach)
    assert get_state_and_fault(request)[0] == "Bound"
    (beside,) = create_and_bind("bits")
    assert get_state_and_fault(beside)[0] == "Bound"
    with pytest.raises(RefusedError, match=r"held by request \[hidden\]: it cannot be programmed for an"):
        create_and_bind("adder")


def test_an_unavailable_image_fails_the_bind_with_its_reason(handle: AttachHandle) -> None:
    (request,) = create_and_bind("adder")
    command_queue.mark_image_failed(Command.objects.get().id, "no image with accel:function_id=adder")
    command_endings.end_answered_commands()
    assert get_state_and_fault(request) == ("BindFailed", "no image with accel:function_id=adder")
    assert Command.objects.get().state == "refused"
    assert Device.objects.get().busy_with is None


def test_nothing_is_programmed_for_a_request_whose_bind_is_past_its_deadline(handle: AttachHandle) -> None:
    make_handles_pci()
    (request,) = create_and_bind("adder")
    with conductor.writing():
        AcceleratorRequest.objects.update(deadline=datetime.now(UTC) - timedelta(seconds=1))
    binding.fail_overdue_binds()
    assert get_state_and_fault(request)[0] == "BindFailed"
    assert not command_queue.mark_image_ready(Command.objects.get().id, ADDER_IMAGE)
    command_endings.end_answered_commands()
    assert Device.objects.get().busy_with is None


def test_nothing_is_programmed_for_a_deleted_request(handle: AttachHandle) -> None:
    make_handles_pci()
    (request,) = create_and_bind("adder")
    binding.delete_requests([str(request.uuid)], NOVA)
    command = Command.objects.get()
    assert not command_queue.mark_image_ready(command.id, ADDER_IMAGE)
    command_endings.end_answered_commands()
    command.refresh_from_db()
    assert (command.state, command.text) == ("refused", "its request does not need it any more")
    assert Device.objects.get().busy_with is None
