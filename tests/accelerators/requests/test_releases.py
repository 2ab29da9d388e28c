"""Test released PCI handles: no other request gets one before its host has confirmed that no guest uses it (S1)."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db import IntegrityError, connection
from django.test.utils import CaptureQueriesContext
from msgspec.structs import replace

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.devices import lifecycle
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Command,
    Deployable,
    Device,
    DeviceProfile,
    Event,
    Host,
    Intent,
    ReleasedHandle,
)
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.requests import binding, candidates, capacity
from accelerators.requests.binding import BindSpec
from accelerators.workflows import command_endings, release_checks
from cyborgweb.auth import read_only
from cyborgweb.monitoring import backlog
from cyborgweb.server import after_restore
from drivers.inventory import Device as ReportedDevice
from placement_sync.jobs import repository
from placement_sync.mapping import compute_desired_providers
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.requests import NOVA, answer_commands, bind_new_requests, create_profiles, offer_devices

pytestmark = pytest.mark.django_db
PROVIDER = str(uuid4())
ACTS = "detach health reset"


def make_reported_card(handles: int = 1, acts: str = ACTS, in_use: str = "") -> ReportedDevice:
    """Return the report of a card whose handles are all in the same use."""
    card = make_card(1, handles, acts=acts)
    (part,) = card.deployables
    used = tuple(replace(one, in_use=in_use) for one in part.handles)
    return replace(card, deployables=(replace(part, handles=used),))


def offer_card(handles: int = 1, acts: str = ACTS, in_use: str = "", seq: int = 1) -> Host:
    """Report the card, and make it ready; return its host."""
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_reported_card(handles, acts, in_use)), seq=seq)
    offer_devices(PROVIDER)
    create_profiles(plain={}, adder={"accel:function_id": "adder"})
    return host


def bind(instance: str = "", profile: str = "plain") -> AcceleratorRequest:
    """Create a request and bind it; return it."""
    (request,) = bind_new_requests(profile, PROVIDER, instance)
    return request


def answer(outcome: str = "succeeded", text: str = "") -> None:
    """Answer the open question as the host's agent."""
    answer_commands(Command.objects.get(COMMAND_IS_OPEN), outcome=outcome, text=text)


def let_time_pass(**columns: datetime) -> None:
    """Set the times of all releases, by default so that the hosts are asked again, and run the job."""
    with conductor.writing():
        ReleasedHandle.objects.update(**{"ask_at": datetime.now(UTC) - timedelta(seconds=1)} | columns)
    release_checks.ask_hosts_again()


def forget_intents() -> None:
    with conductor.writing():
        Intent.objects.all().delete()


def unbind(request: AcceleratorRequest) -> None:
    binding.unbind_requests([str(request.uuid)], NOVA)


def delete(request: AcceleratorRequest) -> None:
    binding.delete_requests([str(request.uuid)], NOVA)


@pytest.mark.parametrize("release", [unbind, delete])
def test_S1_a_function_detached_from_a_running_instance_is_not_given_before_its_host_confirms(release: object) -> None:
    offer_card()
    request = bind()
    assert request.state == "Bound", "a PCI function needs no command to be bound"
    release(request)  # type: ignore[operator]
    question = Command.objects.get(COMMAND_IS_OPEN)
    handle = AttachHandle.objects.get()
    assert (question.op, question.arguments["uuid"], question.exclusive) == ("detach", str(handle.uuid), False)
    for outcome, text in (("refused", "a guest still uses 0000:01:00.0"), ("unknown", "the agent stopped")):
        with pytest.raises(RefusedError, match=r"released and not confirmed by the host as unused \(1\)") as refused:
            bind()
        assert refused.value.reason == RefusalReason.NONE_FREE
        answer(outcome, text)
        assert text in AttachHandle.objects.get().reason_not_offered
        let_time_pass()
    answer("succeeded", "no guest uses 0000:01:00.0")
    assert not ReleasedHandle.objects.exists()
    assert AttachHandle.objects.get().reason_not_offered == ""
    assert bind().state == "Bound"
    actions = Event.objects.filter(subject=Device.objects.get().uuid).order_by("id").values_list("action", flat=True)
    assert list(actions)[-2:] == ["device.handle_held_back", "device.handle_freed"]


@pytest.mark.parametrize(("in_use", "waits"), [("", False), ("guest", True), ("unknown", True)])
def test_novas_delete_frees_a_function_at_once_only_if_the_last_report_shows_it_unused(
    in_use: str, waits: bool
) -> None:
    offer_card()
    request = bind()
    apply_report(get_or_create_host(), make_driver_report(make_reported_card(in_use=in_use)), seq=2)
    with CaptureQueriesContext(connection) as statements:
        binding.delete_requests_of_instance(str(request.instance_uuid), NOVA)
    assert ReleasedHandle.objects.exists() is waits
    assert Command.objects.exists() is waits
    if not waits:
        assert len([one for one in statements if "SAVEPOINT" not in one["sql"]]) <= 3
        assert bind().state == "Bound"


@pytest.mark.parametrize("silent", ["agent", "driver", "backend"])
def test_S1_novas_delete_keeps_a_function_back_if_the_last_report_may_be_out_of_date(silent: str) -> None:
    host = offer_card()
    request = bind()
    with conductor.writing():
        driver = Device.objects.get().driver
        entry = {"driver": {"error": "it hangs"}, "backend": {"error": "", "backends": {"": {"error": "it hangs"}}}}
        if silent == "agent":
            conductor.set_hosts_stale_since([host.id], datetime.now(UTC))
        else:
            Host.objects.update(drivers={driver: entry[silent]})
    binding.delete_requests_of_instance(str(request.instance_uuid), NOVA)
    assert ReleasedHandle.objects.exists() and Command.objects.filter(op="detach").exists()
    with pytest.raises(RefusedError, match="released and not confirmed by the host"):
        bind()


def test_functions_of_a_driver_that_cannot_answer_are_free_at_once_as_before() -> None:
    offer_card(acts="health reset", in_use="guest")
    unbind(bind())
    assert not Command.objects.exists()
    binding.delete_requests_of_instance(str(bind().instance_uuid), NOVA)
    assert bind().state == "Bound"


def test_a_bind_that_failed_or_was_never_answered_leaves_nothing_to_ask() -> None:
    offer_card()
    (uuid,) = binding.create_requests("plain", NOVA)
    binding.delete_requests([uuid], NOVA)
    started = bind(profile="adder")
    assert started.state == "BindStarted", "the instance has not been told of the function"
    delete(started)
    assert not ReleasedHandle.objects.exists()


def test_S1_a_handle_that_waits_too_long_quarantines_its_device_and_is_never_freed_without_an_answer() -> None:
    offer_card(handles=2)
    request = bind()
    unbind(request)
    past = datetime.now(UTC) - timedelta(seconds=1)
    let_time_pass(ask_until=past)
    device = Device.objects.get()
    assert (device.state, device.state_by) == ("quarantined", "releases")
    assert device.state_reason == (
        f"0000:01:00.0: instance {request.instance_uuid} had it, and its host has not confirmed that no guest uses it"
        " (there is no answer yet). Start the host's agent if it is down; end the guest, or detach the function from"
        " it. The host is asked until it confirms that no guest uses the function; then release the device."
    )
    lifecycle.apply_action_to_device(Action.RELEASE, device.uuid, NOVA)
    lifecycle.apply_action_to_device(Action.ENABLE, device.uuid, NOVA)
    other = bind()
    assert other.attach_handle != request.attach_handle, "the handle that waits is not given, whatever people decide"
    with pytest.raises(RefusedError, match="released and not confirmed"):
        bind()
    let_time_pass(ask_until=past)
    assert Device.objects.get().state == "quarantined"
    answer()
    assert not ReleasedHandle.objects.exists()
    assert Device.objects.get().state == "quarantined", "a person ends the quarantine"


def test_the_quarantine_says_that_the_agent_is_away_and_the_host_is_asked_when_it_is_back() -> None:
    host = offer_card()
    unbind(bind())
    conductor.set_hosts_stale_since([host.id], datetime.now(UTC))
    let_time_pass(ask_until=datetime.now(UTC) - timedelta(seconds=1))
    assert "the agent of cmp1 sends no heartbeats" in Device.objects.get().state_reason
    with conductor.writing():
        past = datetime.now(UTC) - timedelta(seconds=1)
        Command.objects.update(start_by=past, end_by=past)
    command_endings.end_late_commands()
    let_time_pass()
    assert not Command.objects.filter(COMMAND_IS_OPEN).exists(), "a silent agent is asked nothing"
    put_off_question()
    conductor.set_hosts_stale_since([host.id], None)
    release_checks.ask_hosts_again()
    answer()
    assert not ReleasedHandle.objects.exists()


def put_off_question() -> None:
    """Let all handles wait for an hour since the last question, of which two minutes are over."""
    with conductor.writing():
        now = datetime.now(UTC)
        ReleasedHandle.objects.update(ask_at=now + timedelta(seconds=3480), updated_at=now - timedelta(seconds=120))


def test_a_host_is_asked_about_an_old_release_once_an_hour_and_after_each_new_report() -> None:
    host = offer_card()
    unbind(bind())
    answer("refused", "a guest uses it")
    with conductor.writing():
        ReleasedHandle.objects.update(created_at=datetime.now(UTC) - timedelta(hours=10))
    let_time_pass()
    pause_s = (ReleasedHandle.objects.get().ask_at - datetime.now(UTC)).total_seconds()
    assert 3590 < pause_s <= 3600
    answer("refused", "a guest uses it")
    asked = Command.objects.count()
    put_off_question()
    with conductor.writing():
        Host.objects.update(updated_at=datetime.now(UTC) - timedelta(hours=1))
    release_checks.ask_hosts_again()
    assert Command.objects.count() == asked, "nothing has changed on the host"
    apply_report(host, make_driver_report(make_reported_card(in_use="guest")), seq=2)
    for _ in range(2):
        release_checks.ask_hosts_again()
    assert Command.objects.count() == asked + 1


def test_the_host_is_asked_soon_after_an_operator_has_released_the_device() -> None:
    offer_card()
    unbind(bind())
    answer("refused", "a guest uses it")
    let_time_pass(ask_until=datetime.now(UTC) - timedelta(seconds=1))
    answer("refused", "a guest uses it")
    put_off_question()
    with conductor.writing():
        Device.objects.update(updated_at=datetime.now(UTC) - timedelta(hours=1))
        Host.objects.update(updated_at=datetime.now(UTC) - timedelta(hours=1))
    release_checks.ask_hosts_again()
    assert not Command.objects.filter(COMMAND_IS_OPEN).exists()
    lifecycle.apply_action_to_device(Action.RELEASE, Device.objects.get().uuid, NOVA)
    release_checks.ask_hosts_again()
    answer()
    assert not ReleasedHandle.objects.exists()


def test_the_backlog_counts_handles_that_wait_for_their_host_and_those_not_confirmed_in_time() -> None:
    offer_card(handles=2)
    for request in (bind(), bind()):
        unbind(request)
    past = datetime.now(UTC) - timedelta(seconds=1)
    with conductor.writing():
        ReleasedHandle.objects.filter(id=ReleasedHandle.objects.all()[0].id).update(ask_until=past)
    let_time_pass()
    work = backlog.read_backlog()
    assert (work.released, work.unconfirmed) == (2, 1)


def test_a_repeated_question_with_the_same_answer_as_before_records_no_end() -> None:
    offer_card()
    unbind(bind())
    for text in ("a guest uses it", "a guest uses it", "a guest uses it", "it cannot be seen", "it cannot be seen"):
        answer("refused", text)
        let_time_pass()
    reasons = Event.objects.filter(action="command.refused").order_by("id").values_list("reason", flat=True)
    assert [reason.partition("; ")[2] for reason in reasons] == ["a guest uses it", "it cannot be seen"]


@pytest.mark.parametrize("is_held_elsewhere", [True, False])
def test_a_device_is_not_quarantined_again_while_another_request_holds_the_released_function(
    is_held_elsewhere: bool,
) -> None:
    """This is the state after an upgrade that found two requests for one function, when one of the two servers was
    deleted."""
    host = offer_card(in_use="guest")
    late = bind()
    with conductor.writing(), connection.cursor() as cursor:
        copy = Device.objects.create(host=host, key="former", driver="d", type="FPGA", address="0000:01:00.0")
        part = Deployable.objects.create(device=copy, name="former", num_accelerators=1)
        handle = AttachHandle.objects.get()
        handle.pk, handle.uuid, handle.deployable = None, uuid4(), part
        handle.save()
        cursor.execute("SET LOCAL session_replication_role = replica")
        held = AcceleratorRequest.objects.create(
            project_id="p1", profile=DeviceProfile.objects.all()[0], group={}, state="Bound", attach_handle=handle
        )
        cursor.execute("SET LOCAL session_replication_role = DEFAULT")
    binding.delete_requests_of_instance(str(late.instance_uuid), NOVA)
    answer("refused", "a guest uses it")
    if not is_held_elsewhere:
        unbind(held)
    let_time_pass(ask_until=datetime.now(UTC) - timedelta(seconds=1))
    device = Device.objects.get(key__startswith="pci:")
    assert device.state == ("ready" if is_held_elsewhere else "quarantined")
    if is_held_elsewhere:
        assert ReleasedHandle.objects.get().ask_until > datetime.now(UTC), "it is looked at again"


def test_a_host_is_asked_one_question_at_a_time_with_growing_pauses() -> None:
    offer_card()
    unbind(bind())
    let_time_pass()
    assert Command.objects.count() == 1, "the first question is still open"
    answer("refused", "a guest uses it")
    with conductor.writing():
        ReleasedHandle.objects.update(created_at=datetime.now(UTC) - timedelta(seconds=60))
    let_time_pass()
    release = ReleasedHandle.objects.get()
    pause_s = (release.ask_at - datetime.now(UTC)).total_seconds()
    assert 25 < pause_s < 31, "half the age"
    assert Command.objects.count() == 2


def test_the_event_about_a_freed_handle_names_no_instance_if_none_is_known() -> None:
    offer_card()
    unbind(bind())
    with conductor.writing():
        ReleasedHandle.objects.update(instance=None)
    answer()
    assert [*Event.objects.get(action="device.handle_freed").changes.values()] == [[None, None]]


def test_the_description_of_a_release_names_no_instance_if_none_is_known() -> None:
    assert ReleasedHandle().description.startswith("an unknown instance had it")
    instance = uuid4()
    assert ReleasedHandle(instance=instance).description.startswith(f"instance {instance} had it")


def test_an_answer_to_a_question_from_before_the_release_frees_nothing() -> None:
    offer_card()
    unbind(bind())
    with conductor.writing():
        ReleasedHandle.objects.update(created_at=datetime.now(UTC) + timedelta(seconds=5))
    answer()
    assert ReleasedHandle.objects.exists()


def test_S2_the_database_itself_refuses_a_request_for_a_released_handle() -> None:
    offer_card()
    unbind(bind())
    (uuid,) = binding.create_requests("plain", NOVA)
    handle = AttachHandle.objects.get()
    with pytest.raises(IntegrityError, match="has not confirmed that no guest uses it"), conductor.writing():
        AcceleratorRequest.objects.filter(uuid=uuid).update(state="Bound", attach_handle=handle)


def test_S1_no_destructive_act_touches_a_device_while_a_guest_may_use_one_of_its_released_functions() -> None:
    offer_card(handles=2)
    unbind(bind())
    device = Device.objects.get()
    with pytest.raises(RefusedError, match="held by a guest, perhaps: instance") as refused:
        safety.find_holders([device], safety.NO_ANSWERS).refuse_unless_free(device, "reset")
    assert refused.value.reason == RefusalReason.IN_USE
    with pytest.raises(RefusedError, match="its device cannot be programmed: instance"):
        bind(profile="adder")
    lifecycle.disable_device(device.uuid, NOVA)
    with pytest.raises(RefusedError, match="cannot be retired"):
        lifecycle.apply_action_to_device(Action.RETIRE, device.uuid, NOVA)
    with conductor.writing():
        Device.objects.update(to_install="make 4 virtual functions")
    with pytest.raises(RefusedError, match="cannot be installed"):
        lifecycle.enable_device(device.uuid, NOVA)


def test_a_handle_that_waits_is_reserved_in_placement_and_not_free_in_the_capacity() -> None:
    host = offer_card(handles=4)
    kept, released = bind(), bind()
    forget_intents()
    unbind(released)
    assert Intent.objects.get(kind="provider").key == str(host.uuid)
    ((provider,),) = [list(compute_desired_providers(repository.load_deployables(host))[0].values())]
    assert (provider.total, provider.reserved) == (4, 1)
    ((group,),) = capacity.query_groups([capacity.CapacityQuery(["host"], limit=2)])
    assert (group.total, group.held, group.free, group.reserved) == (4, 1, 2, 1)
    forget_intents()
    answer()
    assert Intent.objects.filter(kind="provider").exists()
    ((provider,),) = [list(compute_desired_providers(repository.load_deployables(host))[0].values())]
    assert provider.reserved == 0
    assert kept.state == "Bound"


def test_several_functions_of_one_instance_are_asked_for_one_by_one() -> None:
    offer_card(handles=3, in_use="guest")
    instance = str(uuid4())
    uuids = [uuid for _ in range(3) for uuid in binding.create_requests("plain", NOVA)]
    binding.bind_requests([BindSpec(uuid, "cmp1", PROVIDER, instance) for uuid in uuids], NOVA)
    binding.delete_requests_of_instance(instance, NOVA)
    assert {str(one.instance) for one in ReleasedHandle.objects.all()} == {instance}
    first, second, third = Command.objects.order_by("id")
    for command, outcome in ((first, "succeeded"), (second, "refused"), (third, "succeeded")):
        command_queue.store_answers([CommandAnswer(command.host_id, command.id, outcome, "as it is")])
    command_endings.end_answered_commands()
    assert str(ReleasedHandle.objects.get().handle.uuid) == second.arguments["uuid"]


def test_a_report_stores_the_use_of_each_handle_and_says_so_in_the_devices_event() -> None:
    offer_card()
    assert AttachHandle.objects.get().in_use == ""
    for seq, use in ((2, "unknown"), (3, "unknown"), (4, "")):
        apply_report(get_or_create_host(), make_driver_report(make_reported_card(in_use=use)), seq=seq)
        assert AttachHandle.objects.get().in_use == use
    changes = [one.changes for one in Event.objects.filter(action="device.changed").order_by("id")]
    info = json.dumps({"bus": "01", "device": "00", "domain": "0000", "function": "0"})
    assert changes == [{f"use of handle {info}": ["", "unknown"]}, {f"use of handle {info}": ["unknown", ""]}]
    assert Device.objects.get().generation == 0, "its layout is the same"


def offer_mdevs() -> None:
    """Report the card; its handles are mediated devices, which the host makes."""
    offer_card(handles=2)
    with conductor.writing():
        AttachHandle.objects.update(attach_type="MDEV")


def test_a_mediated_device_is_given_again_when_its_detach_has_succeeded_which_is_ordered_until_it_does() -> None:
    offer_mdevs()
    request = bind()
    answer()
    delete(AcceleratorRequest.objects.get(uuid=request.uuid))
    device = Device.objects.get()
    for n, outcome in enumerate(("refused", "failed", "unknown")):
        detach = Command.objects.get(COMMAND_IS_OPEN)
        assert (detach.op, detach.arguments["consumer"]) == ("detach", str(request.instance_uuid))
        answer(outcome, f"a guest uses it ({n})")
        let_time_pass()
    assert Event.objects.filter(action="device.not_detached").count() == 1, "repeated attempts are not told again"
    assert (Device.objects.get().state, ReleasedHandle.objects.get().ask_until) == ("ready", None), "it is safe to wait"
    with conductor.writing():
        past = datetime.now(UTC) - timedelta(seconds=1)
        Command.objects.filter(COMMAND_IS_OPEN).update(start_by=past, end_by=past)
    command_endings.end_late_commands()
    let_time_pass()
    assert bind().attach_handle_id != request.attach_handle_id
    assert device.state == "ready"
    answer_commands(*Command.objects.filter(COMMAND_IS_OPEN))
    assert not ReleasedHandle.objects.exists()


def test_the_first_detach_that_succeeds_gives_a_mediated_device_free() -> None:
    offer_mdevs()
    bound, failed = bind(), bind()
    first, second = Command.objects.filter(COMMAND_IS_OPEN).order_by("id")
    for attach, outcome in ((first, "succeeded"), (second, "failed")):
        command_queue.store_answers([CommandAnswer(attach.host_id, attach.id, outcome, "as it is")])
    command_endings.end_answered_commands()
    delete(AcceleratorRequest.objects.get(uuid=bound.uuid))
    assert {one.handle_id for one in ReleasedHandle.objects.all()} == {bound.attach_handle_id, failed.attach_handle_id}
    answer_commands(*Command.objects.filter(COMMAND_IS_OPEN))
    assert not ReleasedHandle.objects.exists()


def test_a_released_handle_counts_against_the_total_as_it_does_in_placement() -> None:
    offer_mdevs()
    requests = [bind(), bind()]
    for attach in Command.objects.filter(COMMAND_IS_OPEN):
        command_queue.store_answers([CommandAnswer(attach.host_id, attach.id, "succeeded")])
    command_endings.end_answered_commands()
    delete(requests[0])
    answer()
    delete(requests[1])
    apply_report(get_or_create_host(), make_driver_report(make_reported_card(handles=1)), seq=2)
    with conductor.writing():
        AttachHandle.objects.update(attach_type="MDEV")
    assert AttachHandle.objects.filter(missing_since=None, request=None, release=None).count() == 1
    assert candidates.find_candidates(get_or_create_host()) == []
    ((group,),) = capacity.query_groups([capacity.CapacityQuery(["host"], limit=2)])
    assert (group.total, group.held, group.free, group.reserved) == (1, 0, 0, 1)


@pytest.mark.parametrize(("outcome", "waits"), [("unknown", True), ("failed", True), ("refused", False)])
def test_what_a_failed_bind_may_have_made_on_the_host_is_removed_before_the_handle_is_given_again(
    outcome: str, waits: bool
) -> None:
    offer_mdevs()
    bind()
    answer(outcome, "the agent stopped")
    assert ReleasedHandle.objects.exists() is waits
    assert Command.objects.filter(COMMAND_IS_OPEN, op="detach").exists() is waits


@pytest.mark.slow
def test_after_a_restore_a_release_from_long_ago_does_not_quarantine_its_device() -> None:
    offer_card()
    unbind(bind())
    past = datetime.now(UTC) - timedelta(days=3)
    with conductor.writing():
        ReleasedHandle.objects.update(ask_until=past)
        Command.objects.update(start_by=past, end_by=past)
        conductor.record_event("test.aged", EventSource.SYSTEM, "a test")
    after_restore.prepare_restored_database(NOVA, "restored")
    read_only.switch_read_only(False, NOVA, "checked", EventSource.SYSTEM)
    let_time_pass()
    assert Device.objects.get().state == "ready"
    answer()
    assert not ReleasedHandle.objects.exists()
