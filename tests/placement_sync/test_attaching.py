"""Test that an accelerator is attached to a running instance, and detached: claim, bind, notice, watch, release."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AcceleratorRequest, Attachment, Command, Device, DeviceProfile, Event, Intent
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from accelerators.requests.candidates import ProviderCandidate, choose_providers
from accelerators.runtime import jobs
from accelerators.workflows import attachment_orders, attachment_steps, command_endings
from placement_sync.jobs import discrepancies, providers
from placement_sync.models import Discrepancy, Look, NovaEndpoint, Tree, Vanished
from placement_sync.nova import deleted_instances
from tests.placement_sync import attaching as lab
from tests.placement_sync.attaching import (
    ADMIN_CALLER,
    INSTANCE,
    LONG_AGO,
    ROOT,
    FakeCloud,
    ask_attachment,
    current_state,
    make_ready_cards,
    provider_of_card,
    request_states,
    run_steps,
    troubled_session,
)

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def cloud(settings: Any) -> Iterator[FakeCloud]:
    with lab.configured_cloud(settings) as one:
        yield one


def expect_refusal(reason: RefusalReason, **said: Any) -> str:
    """Check that the attachment is refused for this reason and that nothing was created; return the error's text."""
    with pytest.raises(RefusedError) as error:
        ask_attachment(**said)
    assert error.value.reason is reason, error.value.text
    assert not Attachment.objects.exists()
    return error.value.text


def test_an_attachment_is_claimed_and_bound_and_detaching_releases_claim_and_request(
    cloud: FakeCloud,
) -> None:
    make_ready_cards()
    row = ask_attachment(reason="he asked for it")
    assert (row.state, row.host, row.project_id, request_states()) == ("asked", "cmp1", "p1", [])
    with jobs.JOBS.replaced("notices", jobs.Job("unused", intent_kind="notice")):
        run_steps()
    assert current_state(row) == "attached"
    assert [step["step"] for step in row.steps] == ["asked", "chosen", "claiming", "claimed", "bound"]
    assert cloud.device_allocations() == {provider_of_card(): {"FPGA": 1}}
    request = AcceleratorRequest.objects.get()
    assert (request.state, str(request.instance_uuid), request.project_id) == ("Bound", INSTANCE, "p1")
    assert [request.uuid] == row.requests
    assert Intent.objects.get(kind="notice").key == str(request.uuid)
    assert not Intent.objects.filter(kind="attachment").exists()

    attachment_orders.order_detachment(row.uuid, ADMIN_CALLER, "no more")
    run_steps()
    assert current_state(row) == "detached"
    assert (cloud.device_allocations(), AcceleratorRequest.objects.count()) == ({}, 0)
    attachment_orders.order_detachment(row.uuid, ADMIN_CALLER)
    assert current_state(row) == "detached"
    told = Event.objects.filter(action__startswith="attachment.").order_by("at", "id")
    words = ["asked", "chosen", "claiming", "claimed", "bound", "detaching", "freed", "returning", "detached"]
    assert [event.action.removeprefix("attachment.") for event in told] == words
    assert (told[0].actor, told[0].reason, told[5].reason) == ("olga", "he asked for it", "no more")


@pytest.mark.slow
def test_attaching_and_detaching_keep_the_other_allocations_of_the_instance(cloud: FakeCloud) -> None:
    """The instance also has a request of Nova's on the same provider, and a second attachment."""
    make_ready_cards(handles=4)
    (request,) = binding.create_requests("one", ADMIN_CALLER)
    binding.bind_requests([BindSpec(request, "cmp1", provider_of_card(), INSTANCE)], ADMIN_CALLER)
    cloud.placement.model.allocated[provider_of_card(), "FPGA"] = {INSTANCE: 1}
    rows = [ask_attachment("two"), ask_attachment("one")]
    run_steps()
    assert [current_state(row) for row in rows] == ["attached", "attached"]
    assert (cloud.device_allocations(), request_states()) == ({provider_of_card(): {"FPGA": 4}}, ["Bound"] * 4)
    attachment_orders.order_detachment(rows[0].uuid, ADMIN_CALLER)
    run_steps()
    assert (cloud.device_allocations(), len(request_states())) == ({provider_of_card(): {"FPGA": 2}}, 2)
    attachment_orders.order_detachment(rows[1].uuid, ADMIN_CALLER)
    run_steps()
    assert cloud.device_allocations() == {provider_of_card(): {"FPGA": 1}}
    assert [str(uuid) for uuid in AcceleratorRequest.objects.values_list("uuid", flat=True)] == [request]
    assert cloud.placement.model.allocated[ROOT, "VCPU"] == {INSTANCE: 4}


def test_a_named_device_is_attached_one_unit_at_a_time_until_none_is_free(cloud: FakeCloud) -> None:
    make_ready_cards(2)
    second = Device.objects.get(address="0000:01:00.0")
    row = ask_attachment("", device=second.uuid)
    run_steps()
    assert current_state(row) == "attached"
    assert cloud.device_allocations() == {provider_of_card(1): {"FPGA": 1}}
    assert DeviceProfile.objects.get(name="attach-FPGA").groups == [{"resources:FPGA": "1"}]
    ask_attachment("", device=second.uuid)
    run_steps()
    assert cloud.device_allocations() == {provider_of_card(1): {"FPGA": 2}}
    with pytest.raises(RefusedError, match="has no free unit"):
        ask_attachment("", device=second.uuid)


def test_the_last_free_handle_goes_to_one_of_two_attachments_and_the_other_fails(cloud: FakeCloud) -> None:
    make_ready_cards(handles=1)
    other = cloud.boot_instance(str(uuid.uuid4()))
    rows = [ask_attachment(), ask_attachment(instance=other)]
    run_steps()
    assert [current_state(row) for row in rows] == ["attached", "failed"]
    assert "no free unit" in rows[1].fault
    assert (request_states(INSTANCE), request_states(other), AcceleratorRequest.objects.count()) == (["Bound"], [], 1)
    assert cloud.device_allocations(other) == {}


def test_an_attachment_is_undone_when_nova_binds_the_handle_after_the_claim(cloud: FakeCloud) -> None:
    make_ready_cards(handles=1)
    row = ask_attachment()
    step_until(row, "claimed")
    (request,) = binding.create_requests("one", ADMIN_CALLER)
    binding.bind_requests([BindSpec(request, "cmp1", provider_of_card(), str(uuid.uuid4()))], ADMIN_CALLER)
    run_steps()
    assert (current_state(row), "all are held" in row.fault) == ("failed", True)
    assert (cloud.device_allocations(), AcceleratorRequest.objects.count()) == ({}, 1)


def step_until(row: Attachment, step: str) -> None:
    """Run the job until the attachment is at `step`; fail after ten steps."""
    for _ in range(10):
        row.refresh_from_db()
        if row.step == step:
            return
        lab.attaching.step()
    raise AssertionError(row.step)


@pytest.mark.parametrize("before", ["chosen", "claiming", "claimed"])
def test_an_attachment_detached_before_it_is_attached_fails_and_leaves_nothing(cloud: FakeCloud, before: str) -> None:
    make_ready_cards()
    row = ask_attachment()
    step_until(row, before)
    attachment_orders.order_detachment(row.uuid, ADMIN_CALLER)
    run_steps()
    assert (current_state(row), row.fault) == ("failed", "olga ordered its detachment before it was attached")
    assert (cloud.device_allocations(), AcceleratorRequest.objects.count()) == ({}, 0)


def test_an_attachment_succeeds_while_nova_changes_the_same_consumer(cloud: FakeCloud) -> None:
    """Nova resizes the instance's VCPU before every second of our writes, so that these fail with a conflict."""
    make_ready_cards()
    model, writes = cloud.placement.model, iter(range(8))

    def resized() -> None:
        if (n := next(writes, None)) is not None and n % 2 == 0:
            model.allocated[ROOT, "VCPU"][INSTANCE] = 5 + n
            model.consumer_generations[INSTANCE] += 1

    model.before_write = resized
    row = ask_attachment()
    run_steps()
    assert (current_state(row), cloud.device_allocations()) == ("attached", {provider_of_card(): {"FPGA": 1}})
    attachment_orders.order_detachment(row.uuid, ADMIN_CALLER)
    run_steps()
    assert (current_state(row), cloud.device_allocations()) == ("detached", {})
    assert model.allocated[ROOT, "VCPU"][INSTANCE] > 5


def test_an_attachment_is_undone_when_placement_is_over_capacity(cloud: FakeCloud) -> None:
    make_ready_cards()
    cloud.placement.model.allocated[provider_of_card(), "FPGA"] = {"somebody": 2}
    row = ask_attachment()
    run_steps()
    assert (current_state(row), "over capacity" in row.fault) == ("failed", True)
    assert AcceleratorRequest.objects.count() == 0
    assert cloud.placement.model.allocated[provider_of_card(), "FPGA"] == {"somebody": 2}


def test_attaching_and_detaching_wait_while_placement_is_away(cloud: FakeCloud) -> None:
    make_ready_cards()
    row = ask_attachment()
    cloud.placement.away = True
    run_steps(3)
    assert current_state(row) == "asked"
    assert "nobody is there" in Intent.objects.get(kind="attachment").last_error
    cloud.placement.away = False
    run_steps()
    assert current_state(row) == "attached"
    cloud.placement.away = True
    attachment_orders.order_detachment(row.uuid, ADMIN_CALLER)
    run_steps(5)
    assert (current_state(row), request_states()) == ("detaching", [])
    cloud.placement.away = False
    run_steps()
    assert (current_state(row), cloud.device_allocations()) == ("detached", {})


def test_an_attachment_without_placement_claims_nothing_and_a_step_says_so(cloud: FakeCloud, settings: Any) -> None:
    make_ready_cards()
    settings.KEYS.placement_endpoint = "off"
    row = ask_attachment()
    run_steps()
    assert (current_state(row), cloud.device_allocations(), request_states()) == ("attached", {}, ["Bound"])
    assert row.steps[2]["text"] == "Placement is switched off, so nothing is claimed there"
    attachment_orders.order_detachment(row.uuid, ADMIN_CALLER)
    run_steps()
    assert current_state(row) == "detached"


def test_an_impossible_attachment_is_refused_at_once_with_the_reason(cloud: FakeCloud, settings: Any) -> None:
    make_ready_cards()
    nobody = str(uuid.uuid4())
    assert "Give either a device profile" in expect_refusal(RefusalReason.INVALID, profile="")
    assert "no device profile 'none'" in expect_refusal(RefusalReason.NOT_FOUND, profile="none")
    assert f"Nova has no instance {nobody}" in expect_refusal(RefusalReason.NOT_FOUND, instance=nobody)
    for status, place in (("SHELVED_OFFLOADED", ""), ("ERROR", "cmp1"), ("VERIFY_RESIZE", "cmp1")):
        cloud.nova.shown[INSTANCE] = (status, place)
        assert f"is {status}: devices can only be attached to one that is ACTIVE" in expect_refusal(
            RefusalReason.CONFLICT
        )
    cloud.nova.shown[INSTANCE] = ("ACTIVE", "cmp9")
    assert "is on cmp9, which is no host here" in expect_refusal(RefusalReason.CONFLICT)
    cloud.nova.shown[INSTANCE], cloud.nova.tasks[INSTANCE] = ("ACTIVE", "cmp1"), "resize_prep"
    assert "Nova is working on it (resize_prep)" in expect_refusal(RefusalReason.CONFLICT)
    cloud.nova.tasks.clear()
    with conductor.writing():
        DeviceProfile.objects.create(name="many", groups=[{"resources:FPGA": "3"}])
        DeviceProfile.objects.create(name="else", groups=[{"resources:FPGA": "1", "trait:CUSTOM_TEST": "forbidden"}])
    for profile in ("many", "else"):
        assert "Host cmp1 has no free unit that is ready and fits" in expect_refusal(
            RefusalReason.NONE_FREE, profile=profile
        )
    cloud.placement.away = True
    assert "cannot be asked for now" in expect_refusal(RefusalReason.UNAVAILABLE)
    cloud.placement.away = False
    cloud.placement.model.allocated[ROOT, "VCPU"].clear()
    assert "nothing allocated to instance" in expect_refusal(RefusalReason.CONFLICT)
    cloud.boot_instance(INSTANCE)
    cloud.nova.status = 503
    assert "Nova answered 503" in expect_refusal(RefusalReason.UNAVAILABLE)
    cloud.nova.status = 0
    lifecycle.disable_device(Device.objects.get().uuid, ADMIN_CALLER)
    assert "no free unit that is ready" in expect_refusal(RefusalReason.NONE_FREE)
    settings.KEYS.nova_endpoint = "off"
    assert "Nova is switched off" in expect_refusal(RefusalReason.CONFLICT)
    with attachment_orders.INSTANCE_LOOKUP.replaced("nova", None):
        assert "No cloud is configured" in expect_refusal(RefusalReason.CONFLICT)


def test_a_caller_of_another_project_can_neither_attach_nor_detach(cloud: FakeCloud) -> None:
    make_ready_cards()
    for project, reason in (("p2", RefusalReason.NOT_FOUND), ("", RefusalReason.NOT_FOUND)):
        stranger = Caller("eve", "u", frozenset({"member"}), project)
        with pytest.raises(RefusedError) as error:
            attachment_orders.order_attachment(uuid.UUID(INSTANCE), stranger, profile="one", all_projects=False)
        assert error.value.reason is reason
    row = ask_attachment()
    with pytest.raises(RefusedError, match="There is no attachment"):
        attachment_orders.order_detachment(row.uuid, stranger, all_projects=False)


def test_a_request_that_is_no_attachment_cannot_be_detached(cloud: FakeCloud) -> None:
    make_ready_cards()
    (request,) = binding.create_requests("one", ADMIN_CALLER)
    binding.bind_requests([BindSpec(request, "cmp1", provider_of_card(), INSTANCE)], ADMIN_CALLER)
    with pytest.raises(RefusedError, match="freed when Nova deletes the instance"):
        attachment_orders.order_detachment(uuid.UUID(request), ADMIN_CALLER)
    row = ask_attachment()
    run_steps()
    row.refresh_from_db()
    with pytest.raises(RefusedError, match=f"is a request of attachment {row.uuid}"):
        attachment_orders.order_detachment(row.requests[0], ADMIN_CALLER)


def test_an_instance_with_pci_devices_cannot_get_one_of_another_attach_type(cloud: FakeCloud) -> None:
    make_ready_cards(2)
    (request,) = binding.create_requests("one", ADMIN_CALLER)
    binding.bind_requests([BindSpec(request, "cmp1", provider_of_card(), INSTANCE)], ADMIN_CALLER)
    with conductor.writing():
        second = Device.objects.get(address="0000:01:00.0")
        second.deployables.get().attach_handles.update(attach_type="TEST_PCI")
    assert "has PCI devices, and Nova does not pass those" in expect_refusal(
        RefusalReason.CONFLICT, profile="", device=second.uuid
    )


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_an_attachment_waits_for_the_attach_command_of_the_host(cloud: FakeCloud, outcome: str) -> None:
    make_ready_cards()
    with conductor.writing():
        Device.objects.get().deployables.get().attach_handles.update(attach_type="MDEV")
    row = ask_attachment()
    run_steps(8)
    assert (current_state(row), row.step, request_states()) == ("attaching", "binding", ["BindStarted"])
    command = Command.objects.get(op="attach")
    command_queue.store_answers(
        [command_queue.CommandAnswer(command.host_id, command.id, outcome, "there is no room", {})]
    )
    command_endings.end_answered_commands()
    run_steps()
    if outcome == "succeeded":
        assert (current_state(row), request_states()) == ("attached", ["Bound"])
        attachment_orders.order_detachment(row.uuid, ADMIN_CALLER)
        run_steps()
        assert Command.objects.filter(op="detach").count() == 1
    else:
        assert (current_state(row), "there is no room" in row.fault) == ("failed", True)
    assert (request_states(), cloud.device_allocations()) == ([], {})


def test_an_attachment_of_a_deleted_instance_becomes_detached(cloud: FakeCloud) -> None:
    NovaEndpoint.objects.create(url=cloud.nova.url, proven_at=LONG_AGO)
    make_ready_cards()
    row = ask_attachment()
    run_steps()
    with conductor.writing():
        AcceleratorRequest.objects.update(updated_at=LONG_AGO)
    cloud.nova.shown.clear()
    del (
        cloud.placement.model.allocated[ROOT, "VCPU"][INSTANCE],
        cloud.placement.model.allocated[provider_of_card(), "FPGA"][INSTANCE],
    )
    deleted_instances.step()
    Vanished.objects.update(since=LONG_AGO)
    Look.objects.all().delete()
    deleted_instances.step()
    assert request_states() == []
    run_steps()
    assert current_state(row) == "detached"
    assert "its requests were deleted or unbound" in [step["text"] for step in row.steps][-3]


def test_an_attachment_is_detached_and_unclaimed_when_nova_deletes_its_requests(cloud: FakeCloud) -> None:
    make_ready_cards()
    row = ask_attachment()
    run_steps()
    binding.delete_requests_of_instance(
        INSTANCE, Caller("nova", "u", frozenset({"service", "admin"}), "p1", service=True)
    )
    run_steps()
    assert (current_state(row), cloud.device_allocations()) == ("detached", {})
    assert "deleted or unbound" in row.fault, "its guest may run on with the device"


@pytest.mark.parametrize("change", [{"state": "Unbound", "attach_handle": None}, {"instance_uuid": uuid.uuid4()}])
def test_an_attachment_is_detached_if_a_request_is_not_bound_to_its_instance(
    cloud: FakeCloud, change: dict[str, Any]
) -> None:
    make_ready_cards()
    row = ask_attachment()
    run_steps()
    assert not attachment_steps.detach_lost_attachments()
    with conductor.writing():
        AcceleratorRequest.objects.update(**change)
    assert attachment_steps.detach_lost_attachments()
    assert current_state(row) == "detaching"


def test_a_claim_that_a_resize_dropped_is_a_discrepancy_until_the_attachment_is_detached(cloud: FakeCloud) -> None:
    make_ready_cards()
    row = ask_attachment()
    run_steps()
    with conductor.writing():
        AcceleratorRequest.objects.update(updated_at=LONG_AGO)
    model = cloud.placement.model
    model.replace_allocations(
        INSTANCE,
        {
            "allocations": {ROOT: {"resources": {"VCPU": 8}}},
            "consumer_generation": model.consumer_generations[INSTANCE],
        },
    )
    discrepancies.invalidate_claims(Tree.objects.values_list("pk", flat=True))
    Tree.objects.update(looked_at=LONG_AGO, compared_at=LONG_AGO)
    providers.step()
    discrepancies.step()
    (found,) = Discrepancy.objects.all()
    assert (found.label, str(found.instance), str(found.provider)) == (
        "attached but unclaimed",
        INSTANCE,
        provider_of_card(),
    )
    attachment_orders.order_detachment(row.uuid, ADMIN_CALLER)
    run_steps()
    assert (current_state(row), cloud.device_allocations()) == ("detached", {})
    assert model.allocated[ROOT, "VCPU"] == {INSTANCE: 8}
    Tree.objects.update(compare_at=LONG_AGO)
    discrepancies.step()
    assert not Discrepancy.objects.exists()


def test_an_attachment_is_undone_when_the_instance_moves_before_it_is_bound(cloud: FakeCloud) -> None:
    make_ready_cards()
    row = ask_attachment()
    step_until(row, "claimed")
    cloud.nova.shown[INSTANCE] = ("ACTIVE", "cmp2")
    run_steps()
    assert (current_state(row), cloud.device_allocations(), AcceleratorRequest.objects.count()) == ("failed", {}, 0)


def test_groups_that_fewer_providers_fit_are_placed_first() -> None:
    plain = ProviderCandidate("a", "FPGA", frozenset({"CUSTOM_FAST"}), 2, frozenset({"PCI"}))
    other = ProviderCandidate("b", "FPGA", frozenset(), 3, frozenset({"PCI"}))
    fast = {"resources:FPGA": "2", "trait:CUSTOM_FAST": "required"}
    chosen = choose_providers([{"resources:FPGA": "1"}, fast, {"resources:FPGA": "2"}], [plain, other], "here")
    assert chosen.providers == ("b", "a", "a", "b", "b")
    assert chosen.shares == {"a": ("FPGA", 2), "b": ("FPGA", 3)}
    double = {"resources:FPGA": "1", "trait:CUSTOM_FPGA_XILINX": "required"}
    xilinx = ProviderCandidate("x", "FPGA", frozenset({"CUSTOM_FPGA_XILINX"}), 2, frozenset({"PCI"}))
    assert choose_providers([double], [xilinx], "here").shares == {"x": ("FPGA", 1)}
    assert choose_providers([double], [xilinx], "here").providers == ("x", "x")
    for wanted in ([fast, fast], [{"resources:FPGA": "1", "resources:VGPU": "1"}], [{"resources:VGPU": "1"}]):
        with pytest.raises(RefusedError, match="here has no free unit"):
            choose_providers(wanted, [plain, other], "here")


def test_attachments_that_ended_long_ago_are_deleted(cloud: FakeCloud) -> None:
    make_ready_cards(handles=1)
    ask_attachment()
    old = ask_attachment()
    run_steps()
    assert current_state(old) == "failed"
    with conductor.writing():
        Attachment.objects.filter(pk=old.pk).update(ended_at=LONG_AGO)
    run_steps(1)
    assert [row.state for row in Attachment.objects.all()] == ["attached"]
    assert troubled_session.calls
