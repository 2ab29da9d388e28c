"""The command half of a bind: handles made on the host, devices programmed first, and what is taken back."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db import connection, transaction

from accelerators import conductor
from accelerators.commands import placing
from accelerators.commands.placing import Answer
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, RefusedError
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
)
from accelerators.models.commands import OPEN
from accelerators.requests import binding
from accelerators.requests.binding import Bind
from accelerators.workflows import command_results
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
NOVA = Caller("nova", "n", frozenset({"member"}), "p1", service=True)
PROVIDER, IMAGE = str(uuid4()), str(uuid4())
ADDER = {"id": IMAGE, "size": 3, "sha256": "a" * 64, "properties": {"accel:function_id": "adder"}}


@pytest.fixture
def handle(db: None) -> AttachHandle:
    """The first of three handles of a ready card, made on the host when it is bound."""
    apply(a_host(), answer(card(1, handles=3)))
    with conductor.writing():
        Device.objects.update(state="ready")
        Deployable.objects.update(rp_uuid=PROVIDER)
        AttachHandle.objects.update(attach_type="MDEV")
        for name, more in (
            ("plain", {}),
            ("adder", {"accel:function_id": "adder"}),
            ("bits", {"accel:bitstream_id": IMAGE}),
        ):
            DeviceProfile.objects.create(name=name, groups=[{"resources:FPGA": "1"} | more])
        DeviceProfile.objects.create(name="pair", groups=[{"resources:FPGA": "2", "accel:function_id": "adder"}])
    return AttachHandle.objects.order_by("id")[0]


def pci() -> None:
    """The same card with handles that are libvirt's business."""
    with conductor.writing():
        AttachHandle.objects.update(attach_type="PCI")


def bound(profile: str = "plain", instance: str = "") -> list[AcceleratorRequest]:
    """A bind that was answered 202."""
    uuids, instance = binding.create(profile, NOVA), instance or str(uuid4())
    binding.bind([Bind(uuid, "cmp1", PROVIDER, instance) for uuid in uuids], NOVA)
    return list(AcceleratorRequest.objects.filter(uuid__in=uuids).order_by("id"))


def one_open(op: str) -> Command:
    return Command.objects.get(OPEN, op=op)


def ends(command: Command, outcome: str = "succeeded", text: str = "") -> None:
    placing.answer([Answer(command.host_id, command.id, outcome, text)])
    command_results.settle()


def state(request: AcceleratorRequest) -> tuple[str, str]:
    request.refresh_from_db()
    return request.state, request.fault


def test_a_handle_is_made_on_its_host_and_given_back_there(handle: AttachHandle) -> None:
    (request,) = bound()
    assert state(request) == ("BindStarted", "")
    attach = one_open("attach")
    assert attach.arguments == {
        "driver": "test_driver",
        "key": "pci:0000:01:00.0",
        "deployable": "node_0000:01:00.0",
        "handle": {"attach_type": "MDEV", "info": handle.attach_info},
        "uuid": str(handle.uuid),
        "consumer": str(request.instance_uuid),
    }
    assert (attach.request, attach.exclusive, attach.actor) == (request.uuid, False, "nova")
    assert attach.end_by < request.deadline, "its end tells the request why"
    ends(attach)
    assert state(request) == ("Bound", "")
    event = Event.objects.filter(subject=request.uuid).order_by("-id").first()
    assert (event.action, event.source, event.actor) == ("request.bound", "agent", "commands")
    before, after = event.changes.get("instance_uuid", (None, None))
    assert before == after, "the instance is the one that it was being bound for"
    binding.unbind([str(request.uuid)], NOVA)
    detach = one_open("detach")
    assert detach.arguments == attach.arguments
    assert Device.objects.get().busy_with is None
    ends(detach, "failed", "the mdev is busy")
    device = Device.objects.get()
    assert (device.state, device.state_reason) == ("ready", "a handle could not be detached: the mdev is busy")
    assert Event.objects.filter(action="device.not_detached", subject=device.uuid).count() == 1


@pytest.mark.parametrize(("profile", "seconds"), [("plain", 60), ("adder", 240)])
def test_a_bind_that_programs_has_longer_to_end(handle: AttachHandle, profile: str, seconds: int) -> None:
    (request,) = bound(profile)
    assert request.deadline
    assert seconds - 50 < (request.deadline - datetime.now(UTC)).total_seconds() <= seconds


@pytest.mark.parametrize(("outcome", "given_back"), [("failed", 1), ("unknown", 1), ("refused", 0)])
def test_what_could_not_be_made_is_a_failed_bind_with_the_drivers_reason(
    handle: AttachHandle, outcome: str, given_back: int
) -> None:
    (request,) = bound()
    ends(one_open("attach"), outcome, "no more mdevs of this type")
    assert state(request) == ("BindFailed", "no more mdevs of this type")
    assert request.attach_handle is None
    assert Command.objects.filter(op="detach").count() == given_back


def test_silence_is_a_failed_bind_and_what_was_made_all_the_same_is_given_back_once(handle: AttachHandle) -> None:
    (request,) = bound()
    attach = one_open("attach")
    past = datetime.now(UTC) - timedelta(seconds=1)
    with conductor.writing():
        Command.objects.update(start_by=past, end_by=past)
    command_results.expire()
    assert state(request) == ("BindFailed", "the agent of cmp1 did not accept it in time")
    assert not Command.objects.filter(op="detach").exists(), "as far as is known nothing was made"
    for _ in range(2):
        ends(attach)
    assert one_open("detach").arguments["consumer"] == attach.arguments["consumer"]


def test_a_bind_whose_deadline_passed_gives_back_what_its_host_may_have_made(handle: AttachHandle) -> None:
    (request,) = bound()
    with conductor.writing():
        AcceleratorRequest.objects.update(deadline=datetime.now(UTC) - timedelta(seconds=1))
    binding.expire()
    assert state(request) == ("BindFailed", "nothing was heard from host cmp1 before the deadline")
    assert one_open("detach").request == request.uuid, "the host may have made it and never answer"
    ends(one_open("attach"))
    assert state(request)[0] == "BindFailed"
    assert Command.objects.filter(op="detach").count() == 1


def test_a_request_that_is_bound_again_does_not_take_an_old_answer_for_its_own(handle: AttachHandle) -> None:
    instance = str(uuid4())
    (request,) = bound(instance=instance)
    first = one_open("attach")
    binding.unbind([str(request.uuid)], NOVA)
    binding.bind([Bind(str(request.uuid), "cmp1", PROVIDER, instance)], NOVA)
    ends(first)
    assert state(request)[0] == "BindStarted"
    ends(one_open("attach"))
    assert state(request)[0] == "Bound"
    assert Command.objects.filter(op="detach").count() == 1


def test_a_device_is_programmed_for_all_that_are_bound_together(handle: AttachHandle) -> None:
    first, second = bound("pair")
    attach = Command.objects.get()
    assert (attach.state, attach.exclusive, attach.arguments["wanted"]) == ("preparing", True, {"function_id": "adder"})
    assert Device.objects.get().busy_with == attach.uuid
    with pytest.raises(RefusedError, match="its device is busy with a command") as refused:
        bound("plain")
    assert refused.value.reason == Reason.NONE_FREE
    placing.prepared(attach.id, ADDER)
    ends(attach)
    assert (state(first)[0], state(second)[0]) == ("Bound", "BindStarted"), "its handle is to be made yet"
    part = Deployable.objects.get()
    assert str(part.bitstream_id) == IMAGE
    trait = Attribute.objects.get(origin="conductor")
    assert "CUSTOM_FPGA_FUNCTION_ID" in trait.value and "ADDER" in trait.value
    assert Intent.objects.filter(kind="provider").exists()
    assert Device.objects.get().busy_with is None
    follower = one_open("attach")
    assert (follower.request, follower.exclusive, "image" in follower.arguments) == (second.uuid, False, False)
    ends(follower)
    assert state(second) == ("Bound", "")


def test_functions_of_one_card_share_the_fate_of_the_one_command(handle: AttachHandle) -> None:
    pci()
    first, second = bound("pair")
    ends_with = "the image is for another card"
    placing.prepared(Command.objects.get().id, ADDER)
    ends(Command.objects.get(), "failed", ends_with)
    assert state(first) == state(second) == ("BindFailed", ends_with)
    assert Command.objects.count() == 1, "nothing is made of a PCI function"
    first, second = bound("pair")
    placing.prepared(one_open("attach").id, ADDER)
    ends(one_open("attach"))
    assert state(first) == state(second) == ("Bound", "")


@pytest.mark.django_db(transaction=True)
def test_a_bind_whose_handles_others_keep_locked_ends_and_can_be_tried_again(
    handle: AttachHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "PATIENCE_S", 0.05)
    locked, over = threading.Event(), threading.Event()

    def others() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT FROM accelerators_attachhandle FOR UPDATE")
            locked.set()
            over.wait(5)
        connection.close()

    thread = threading.Thread(target=others, daemon=True)
    thread.start()
    assert locked.wait(10)
    with pytest.raises(RefusedError, match="Others are taking the same accelerators") as refused:
        bound()
    over.set()
    thread.join(10)
    request = AcceleratorRequest.objects.get()
    assert (refused.value.reason, request.state) == (Reason.AWAY, "Initial")
    binding.bind([Bind(str(request.uuid), "cmp1", PROVIDER, str(uuid4()))], NOVA)
    assert state(request)[0] == "BindStarted"


def test_a_device_is_not_programmed_with_two_images_for_one_bind(handle: AttachHandle) -> None:
    uuids, instance = [*binding.create("adder", NOVA), *binding.create("bits", NOVA)], str(uuid4())
    with pytest.raises(RefusedError, match="cannot be programmed with two images at once") as refused:
        binding.bind([Bind(uuid, "cmp1", PROVIDER, instance) for uuid in uuids], NOVA)
    assert refused.value.reason == Reason.NONE_FREE
    assert {*AcceleratorRequest.objects.values_list("state", "attach_handle")} == {("BindFailed", None)}
    assert not Command.objects.exists()


def test_what_holds_the_bitstream_already_is_bound_at_once_beside_others(handle: AttachHandle) -> None:
    pci()
    (request,) = bound("bits")
    placing.prepared(Command.objects.get().id, ADDER)
    ends(Command.objects.get())
    assert state(request)[0] == "Bound"
    (beside,) = bound("bits")
    assert state(beside)[0] == "Bound"
    with pytest.raises(
        RefusedError, match=f"held by request ({request.uuid}|{beside.uuid}): it cannot be programmed for an"
    ):
        bound("adder")


def test_an_image_that_cannot_be_had_is_the_fault_of_the_bind(handle: AttachHandle) -> None:
    (request,) = bound("adder")
    placing.unprepared(Command.objects.get().id, "no image with accel:function_id=adder")
    command_results.settle()
    assert state(request) == ("BindFailed", "no image with accel:function_id=adder")
    assert Command.objects.get().state == "refused"
    assert Device.objects.get().busy_with is None


def test_nothing_is_programmed_for_who_waits_no_more(handle: AttachHandle) -> None:
    pci()
    (request,) = bound("adder")
    binding.delete([str(request.uuid)], NOVA)
    command = Command.objects.get()
    assert not placing.prepared(command.id, ADDER)
    command_results.settle()
    command.refresh_from_db()
    assert (command.state, command.text) == ("refused", "its request does not need it any more")
    assert Device.objects.get().busy_with is None
