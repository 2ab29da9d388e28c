"""An accelerator is attached to an instance that runs, and detached: claimed, bound, told, watched, and given back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from accelerators import conductor
from accelerators.commands import placing
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AcceleratorRequest, Attachment, Command, Device, DeviceProfile, Event, Intent
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from accelerators.requests.candidates import ProviderCandidate, choose_providers
from accelerators.runtime import jobs
from accelerators.workflows import attachments, command_results
from placement_sync.jobs import discrepancies, providers
from placement_sync.models import Discrepancy, Look, Tree, Vanished
from placement_sync.nova import deleted_instances
from tests.placement import attaching as lab
from tests.placement.attaching import LONG_AGO, OLGA, ROOT, VM, Cloud, ask, cards, held, provider, state, there, work

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def cloud(settings: Any) -> Iterator[Cloud]:
    with lab.a_cloud(settings) as one:
        yield one


def refused(reason: RefusalReason, **said: Any) -> str:
    """The sentence with which it is refused; nothing was made."""
    with pytest.raises(RefusedError) as error:
        ask(**said)
    assert error.value.reason is reason, error.value.text
    assert not Attachment.objects.exists()
    return error.value.text


def test_it_is_claimed_bound_and_told_and_given_back(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jobs._registered, "notices", jobs.Job("notices", "unused", "work", intent_kind="notice"))
    cards()
    row = ask(reason="he asked for it")
    assert (row.state, row.host, row.project_id, held()) == ("asked", "cmp1", "p1", [])
    work()
    assert state(row) == "attached"
    assert [step["step"] for step in row.steps] == ["asked", "chosen", "claiming", "claimed", "bound"]
    assert cloud.has() == {provider(): {"FPGA": 1}}
    request = AcceleratorRequest.objects.get()
    assert (request.state, str(request.instance_uuid), request.project_id) == ("Bound", VM, "p1")
    assert [request.uuid] == row.requests
    assert Intent.objects.get(kind="notice").key == str(request.uuid)
    assert not Intent.objects.filter(kind="attachment").exists()

    attachments.order_detachment(row.uuid, OLGA, "no more")
    work()
    assert state(row) == "detached"
    assert (cloud.has(), AcceleratorRequest.objects.count()) == ({}, 0)
    attachments.order_detachment(row.uuid, OLGA)
    assert state(row) == "detached"
    told = Event.objects.filter(action__startswith="attachment.").order_by("at", "id")
    words = ["asked", "chosen", "claiming", "claimed", "bound", "detaching", "freed", "returning", "detached"]
    assert [event.action.removeprefix("attachment.") for event in told] == words
    assert (told[0].actor, told[0].reason, told[5].reason) == ("olga", "he asked for it", "no more")


def test_what_the_instance_has_already_stays_as_it_is(cloud: Cloud) -> None:
    """Nova's own request of the same provider, and another attachment of it."""
    cards(handles=4)
    (request,) = binding.create_requests("one", OLGA)
    binding.bind_requests([BindSpec(request, "cmp1", provider(), VM)], OLGA)
    cloud.placement.model.allocated[provider(), "FPGA"] = {VM: 1}
    rows = [ask("two"), ask("one")]
    work()
    assert [state(row) for row in rows] == ["attached", "attached"]
    assert (cloud.has(), held()) == ({provider(): {"FPGA": 4}}, ["Bound"] * 4)
    attachments.order_detachment(rows[0].uuid, OLGA)
    work()
    assert (cloud.has(), len(held())) == ({provider(): {"FPGA": 2}}, 2)
    attachments.order_detachment(rows[1].uuid, OLGA)
    work()
    assert cloud.has() == {provider(): {"FPGA": 1}}
    assert [str(uuid) for uuid in AcceleratorRequest.objects.values_list("uuid", flat=True)] == [request]
    assert cloud.placement.model.allocated[ROOT, "VCPU"] == {VM: 4}


def test_one_unit_of_a_device(cloud: Cloud) -> None:
    cards(2)
    second = Device.objects.get(address="0000:01:00.0")
    row = ask("", device=second.uuid)
    work()
    assert state(row) == "attached"
    assert cloud.has() == {provider(1): {"FPGA": 1}}
    assert DeviceProfile.objects.get(name="attach-FPGA").groups == [{"resources:FPGA": "1"}]
    ask("", device=second.uuid)
    work()
    assert cloud.has() == {provider(1): {"FPGA": 2}}
    with pytest.raises(RefusedError, match="has no free unit"):
        ask("", device=second.uuid)


def test_the_last_one_goes_to_one_of_two(cloud: Cloud) -> None:
    cards(handles=1)
    other = cloud.boots(str(uuid.uuid4()))
    rows = [ask(), ask(instance=other)]
    work()
    assert [state(row) for row in rows] == ["attached", "failed"]
    assert "no free unit" in rows[1].fault
    assert (held(VM), held(other), AcceleratorRequest.objects.count()) == (["Bound"], [], 1)
    assert cloud.has(other) == {}


def test_taken_by_nova_between_claim_and_bind_it_is_undone(cloud: Cloud) -> None:
    cards(handles=1)
    row = ask()
    until_step(row, "claimed")
    (request,) = binding.create_requests("one", OLGA)
    binding.bind_requests([BindSpec(request, "cmp1", provider(), str(uuid.uuid4()))], OLGA)
    work()
    assert (state(row), "all are held" in row.fault) == ("failed", True)
    assert (cloud.has(), AcceleratorRequest.objects.count()) == ({}, 1)


def until_step(row: Attachment, step: str) -> None:
    """So far and no further."""
    for _ in range(10):
        row.refresh_from_db()
        if row.step == step:
            return
        lab.attaching.step()
    raise AssertionError(row.step)


@pytest.mark.parametrize("before", ["chosen", "claiming", "claimed"])
def test_who_does_not_want_it_any_more_need_not_wait(cloud: Cloud, before: str) -> None:
    cards()
    row = ask()
    until_step(row, before)
    attachments.order_detachment(row.uuid, OLGA)
    work()
    assert (state(row), row.fault) == ("failed", "olga ordered its detachment before it was attached")
    assert (cloud.has(), AcceleratorRequest.objects.count()) == ({}, 0)


def test_others_write_the_same_consumer_meanwhile(cloud: Cloud) -> None:
    """Nova resizes the instance's VCPU each time that we are about to write."""
    cards()
    model, writes = cloud.placement.model, iter(range(8))

    def resized() -> None:
        if (n := next(writes, None)) is not None and n % 2 == 0:
            model.allocated[ROOT, "VCPU"][VM] = 5 + n
            model.written[VM] += 1

    model.before_write = resized
    row = ask()
    work()
    assert (state(row), cloud.has()) == ("attached", {provider(): {"FPGA": 1}})
    attachments.order_detachment(row.uuid, OLGA)
    work()
    assert (state(row), cloud.has()) == ("detached", {})
    assert model.allocated[ROOT, "VCPU"][VM] > 5


def test_what_placement_does_not_want_is_undone(cloud: Cloud) -> None:
    cards()
    cloud.placement.model.allocated[provider(), "FPGA"] = {"somebody": 2}
    row = ask()
    work()
    assert (state(row), "over capacity" in row.fault) == ("failed", True)
    assert AcceleratorRequest.objects.count() == 0
    assert cloud.placement.model.allocated[provider(), "FPGA"] == {"somebody": 2}


def test_while_placement_is_away_it_waits(cloud: Cloud) -> None:
    cards()
    row = ask()
    cloud.placement.away = True
    work(3)
    assert state(row) == "asked"
    assert "nobody is there" in Intent.objects.get(kind="attachment").last_error
    cloud.placement.away = False
    work()
    assert state(row) == "attached"
    cloud.placement.away = True
    attachments.order_detachment(row.uuid, OLGA)
    work(5)
    assert (state(row), held()) == ("detaching", [])
    cloud.placement.away = False
    work()
    assert (state(row), cloud.has()) == ("detached", {})


def test_with_placement_off_nothing_is_claimed_and_that_is_said(cloud: Cloud, settings: Any) -> None:
    cards()
    settings.KEYS.placement_endpoint = "off"
    row = ask()
    work()
    assert (state(row), cloud.has(), held()) == ("attached", {}, ["Bound"])
    assert row.steps[2]["text"] == "Placement is switched off, so nothing is claimed there"
    attachments.order_detachment(row.uuid, OLGA)
    work()
    assert state(row) == "detached"


def test_what_can_be_told_at_once_is_refused_at_once(cloud: Cloud, settings: Any) -> None:
    cards()
    nobody = str(uuid.uuid4())
    assert "Give either a device profile" in refused(RefusalReason.INVALID, profile="")
    assert "no device profile 'none'" in refused(RefusalReason.UNKNOWN, profile="none")
    assert f"Nova has no instance {nobody}" in refused(RefusalReason.UNKNOWN, instance=nobody)
    for status, place in (("SHELVED_OFFLOADED", ""), ("ERROR", "cmp1"), ("VERIFY_RESIZE", "cmp1")):
        cloud.nova.shown[VM] = (status, place)
        assert f"is {status}: devices can only be attached to one that is ACTIVE" in refused(RefusalReason.CONFLICT)
    cloud.nova.shown[VM] = ("ACTIVE", "cmp9")
    assert "is on cmp9, which is no host here" in refused(RefusalReason.CONFLICT)
    cloud.nova.shown[VM], cloud.nova.tasks[VM] = ("ACTIVE", "cmp1"), "resize_prep"
    assert "Nova is working on it (resize_prep)" in refused(RefusalReason.CONFLICT)
    cloud.nova.tasks.clear()
    with conductor.writing():
        DeviceProfile.objects.create(name="many", groups=[{"resources:FPGA": "3"}])
        DeviceProfile.objects.create(name="else", groups=[{"resources:FPGA": "1", "trait:CUSTOM_TEST": "forbidden"}])
    for profile in ("many", "else"):
        assert "Host cmp1 has no free unit that is ready and fits" in refused(RefusalReason.NONE_FREE, profile=profile)
    cloud.placement.away = True
    assert "cannot be asked for now" in refused(RefusalReason.AWAY)
    cloud.placement.away = False
    cloud.placement.model.allocated[ROOT, "VCPU"].clear()
    assert "nothing allocated to instance" in refused(RefusalReason.CONFLICT)
    cloud.boots(VM)
    cloud.nova.status = 503
    assert "Nova answered 503" in refused(RefusalReason.AWAY)
    cloud.nova.status = 0
    lifecycle.disable_device(Device.objects.get().uuid, OLGA)
    assert "no free unit that is ready" in refused(RefusalReason.NONE_FREE)
    settings.KEYS.nova_endpoint = "off"
    assert "Nova is switched off" in refused(RefusalReason.CONFLICT)
    attachments._instance_lookups.clear()
    assert "No cloud is configured" in refused(RefusalReason.CONFLICT)


def test_tenants_see_only_their_own(cloud: Cloud) -> None:
    cards()
    for project, reason in (("p2", RefusalReason.UNKNOWN), ("", RefusalReason.UNKNOWN)):
        stranger = Caller("eve", "u", frozenset({"member"}), project)
        with pytest.raises(RefusedError) as error:
            attachments.order_attachment(uuid.UUID(VM), stranger, profile="one", all_projects=False)
        assert error.value.reason is reason
    row = ask()
    with pytest.raises(RefusedError, match="There is no attachment"):
        attachments.order_detachment(row.uuid, stranger, all_projects=False)


def test_novas_own_requests_are_not_detached(cloud: Cloud) -> None:
    cards()
    (request,) = binding.create_requests("one", OLGA)
    binding.bind_requests([BindSpec(request, "cmp1", provider(), VM)], OLGA)
    with pytest.raises(RefusedError, match="freed when Nova deletes the instance"):
        attachments.order_detachment(uuid.UUID(request), OLGA)
    row = ask()
    work()
    row.refresh_from_db()
    with pytest.raises(RefusedError, match=f"is a request of attachment {row.uuid}"):
        attachments.order_detachment(row.requests[0], OLGA)


def test_pci_devices_are_not_lost_for_the_sake_of_another_kind(cloud: Cloud) -> None:
    cards(2)
    (request,) = binding.create_requests("one", OLGA)
    binding.bind_requests([BindSpec(request, "cmp1", provider(), VM)], OLGA)
    with conductor.writing():
        second = Device.objects.get(address="0000:01:00.0")
        second.deployables.get().attach_handles.update(attach_type="TEST_PCI")
    assert "has PCI devices, and Nova does not pass those" in refused(
        RefusalReason.CONFLICT, profile="", device=second.uuid
    )


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_what_the_host_has_to_make_is_waited_for(cloud: Cloud, outcome: str) -> None:
    cards()
    with conductor.writing():
        Device.objects.get().deployables.get().attach_handles.update(attach_type="MDEV")
    row = ask()
    work(8)
    assert (state(row), row.step, held()) == ("attaching", "binding", ["BindStarted"])
    command = Command.objects.get(op="attach")
    placing.store_answers([placing.CommandAnswer(command.host_id, command.id, outcome, "there is no room", {})])
    command_results.end_answered_commands()
    work()
    if outcome == "succeeded":
        assert (state(row), held()) == ("attached", ["Bound"])
        attachments.order_detachment(row.uuid, OLGA)
        work()
        assert Command.objects.filter(op="detach").count() == 1
    else:
        assert (state(row), "there is no room" in row.fault) == ("failed", True)
    assert (held(), cloud.has()) == ([], {})


def test_when_the_instance_is_gone_so_is_the_attachment(cloud: Cloud) -> None:
    cards()
    row = ask()
    work()
    with conductor.writing():
        AcceleratorRequest.objects.update(updated_at=LONG_AGO)
    cloud.nova.shown.clear()
    del cloud.placement.model.allocated[ROOT, "VCPU"][VM], cloud.placement.model.allocated[provider(), "FPGA"][VM]
    deleted_instances.step()
    Vanished.objects.update(since=LONG_AGO)
    Look.objects.all().delete()
    deleted_instances.step()
    assert held() == []
    work()
    assert state(row) == "detached"
    assert "its requests were deleted or unbound" in [step["text"] for step in row.steps][-3]


def test_shelved_by_nova_it_is_detached_and_the_claim_given_back_if_it_is_there(cloud: Cloud) -> None:
    cards()
    row = ask()
    work()
    binding.delete_requests_of_instance(VM, Caller("nova", "u", frozenset({"service", "admin"}), "p1", service=True))
    work()
    assert (state(row), cloud.has()) == ("detached", {})
    assert "deleted or unbound" in row.fault, "its guest may run on with the device"


def test_a_resize_that_drops_the_claim_is_found(cloud: Cloud) -> None:
    cards()
    row = ask()
    work()
    with conductor.writing():
        AcceleratorRequest.objects.update(updated_at=LONG_AGO)
    model = cloud.placement.model
    model.replace_allocations(
        VM, {"allocations": {ROOT: {"resources": {"VCPU": 8}}}, "consumer_generation": model.written[VM]}
    )
    discrepancies.invalidate_claims(Tree.objects.values_list("pk", flat=True))
    Tree.objects.update(looked_at=LONG_AGO, compared_at=LONG_AGO)
    providers.step()
    discrepancies.step()
    (found,) = Discrepancy.objects.all()
    assert (found.label, str(found.instance), str(found.provider)) == ("attached but unclaimed", VM, provider())
    attachments.order_detachment(row.uuid, OLGA)
    work()
    assert (state(row), cloud.has()) == ("detached", {})
    assert model.allocated[ROOT, "VCPU"] == {VM: 8}
    Tree.objects.update(compare_at=LONG_AGO)
    discrepancies.step()
    assert not Discrepancy.objects.exists()


def test_what_moved_away_before_it_was_bound_is_undone(cloud: Cloud) -> None:
    cards()
    row = ask()
    until_step(row, "claimed")
    cloud.nova.shown[VM] = ("ACTIVE", "cmp2")
    work()
    assert (state(row), cloud.has(), AcceleratorRequest.objects.count()) == ("failed", {}, 0)


def test_groups_that_few_providers_fit_choose_first() -> None:
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


def test_old_ones_are_forgotten(cloud: Cloud) -> None:
    cards(handles=1)
    ask()
    old = ask()
    work()
    assert state(old) == "failed"
    with conductor.writing():
        Attachment.objects.filter(pk=old.pk).update(ended_at=LONG_AGO)
    work(1)
    assert [row.state for row in Attachment.objects.all()] == ["attached"]
    assert there.calls
