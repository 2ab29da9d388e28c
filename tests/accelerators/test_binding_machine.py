"""A state machine over requests and the commands they wait for: whatever is done in whatever order, nothing illegal is
ever stored, and nothing waits without end (S1, S2, L2)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db.models import Q
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from accelerators import binding, commands, conductor, lifecycle, outcomes
from accelerators.binding import Bind
from accelerators.caller import Caller
from accelerators.commands import ON_HOST, Answer
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Attribute,
    Command,
    Deployable,
    Device,
    DeviceProfile,
    Intent,
)
from accelerators.models.commands import OPEN
from accelerators.refusals import Reason, Refused
from accelerators.states import REQUEST_MOVES, RequestState
from tests.support.reports import a_host, answer, apply, card

NOVA = Caller("nova", "u", frozenset({"member"}), "p1", service=True)
IMAGE = str(uuid4())
PROFILES = {
    "plain": {"resources:FPGA": "1"},
    "function": {"resources:FPGA": "1", "accel:function_id": "f"},
    "bitstream": {"resources:FPGA": "1", "accel:bitstream_id": IMAGE},
}
_R = RequestState


class Requests(RuleBasedStateMachine):
    """Two cards of two handles each, one PCI and one whose handles are made on the host; a model beside them."""

    made = Bundle("made")

    @initialize()
    def begin(self) -> None:
        self.states: dict[str, RequestState] = {}
        apply(a_host(f"cmp-{uuid4()}"), answer(card(1, 2, acts="reset"), card(2, 2, acts="reset")))
        with conductor.writing():
            Device.objects.update(state="ready")
            self.providers = [str(uuid4()), str(uuid4())]
            for part, provider in zip(Deployable.objects.order_by("id"), self.providers, strict=True):
                Deployable.objects.filter(id=part.id).update(rp_uuid=provider)
            AttachHandle.objects.filter(deployable__rp_uuid=self.providers[1]).update(attach_type="MDEV")
            for name, group in PROFILES.items():
                DeviceProfile.objects.create(name=name, groups=[group])

    @rule(target=made, profile=st.sampled_from(sorted(PROFILES)))
    def create(self, profile: str) -> str:
        (uuid,) = binding.create(profile, NOVA)
        self.states[uuid] = _R.INITIAL
        return uuid

    @rule(uuids=st.lists(made, min_size=1, max_size=3, unique=True), card=st.integers(0, 1))
    def bind(self, uuids: list[str], card: int) -> None:
        instance, part = str(uuid4()), Deployable.objects.get(rp_uuid=self.providers[card])
        images = {str(image) for uuid in uuids if (image := self.image(uuid)) and image != str(part.bitstream_id)}
        held = AcceleratorRequest.objects.filter(deployable=part, state__in=[_R.BIND_STARTED, _R.BOUND]).exists()
        possible = self.free(card) >= len(uuids) and len(images) < 2 and not (images and held)
        legal = all(_R.BIND_STARTED in REQUEST_MOVES[self.states[uuid]] for uuid in uuids)
        try:
            binding.bind([Bind(uuid, "cmp1", self.providers[card], instance) for uuid in uuids], NOVA)
        except Refused as refused:
            if not legal:
                assert refused.reason == Reason.STATE
                return
            assert refused.reason == Reason.NONE_FREE
            assert not possible
            self.states |= dict.fromkeys(uuids, _R.BIND_FAILED)
            return
        assert legal and possible
        self.states |= dict.fromkeys(uuids, _R.BIND_STARTED if images or card == 1 else _R.BOUND)

    @rule(uuids=st.lists(made, min_size=1, max_size=3, unique=True))
    def unbind(self, uuids: list[str]) -> None:
        binding.unbind(uuids, NOVA)
        self.states |= dict.fromkeys(uuids, _R.UNBOUND)

    @rule(uuid=consumes(made))
    def delete(self, uuid: str) -> None:
        binding.delete([uuid], NOVA)
        del self.states[uuid]

    @rule(card=st.integers(0, 1), offer=st.booleans())
    def offer(self, card: int, offer: bool) -> None:
        device = Device.objects.get(deployables__rp_uuid=self.providers[card])
        try:
            (lifecycle.enable if offer else lifecycle.disable)(device.uuid, NOVA)
        except Refused as refused:
            assert offer and device.busy_with and refused.reason == Reason.CONFLICT

    @rule(card=st.integers(0, 1))
    def reset(self, card: int) -> None:
        device = Device.objects.get(deployables__rp_uuid=self.providers[card])
        held = AcceleratorRequest.objects.filter(attach_handle__deployable__device=device).exists()
        try:
            commands.ask("reset", device.uuid, NOVA)
        except Refused as refused:
            assert refused.reason == (Reason.CONFLICT if device.busy_with else Reason.HELD)
            assert held or device.busy_with
        else:
            assert not held and not device.busy_with

    @rule(data=st.data(), outcome=st.sampled_from(["succeeded", "succeeded", "failed", "refused", "unknown"]))
    def an_agent_answers(self, data: st.DataObject, outcome: str) -> None:
        waiting = list(Command.objects.filter(OPEN).order_by("id"))
        if not waiting:
            return
        command = data.draw(st.sampled_from(waiting))
        if command.state == "preparing":
            if outcome == "refused":
                commands.unprepared(command.id, "there is no such image")
            else:
                commands.prepared(command.id, {"id": IMAGE, "size": 1, "sha256": "a" * 64})
        else:
            assert not commands.answer([Answer(command.host_id, command.id, outcome, "as it is")])
        self.follow(outcomes.settle)

    @rule()
    def commands_run_out_of_time(self) -> None:
        with conductor.writing():
            past = datetime.now(UTC) - timedelta(seconds=1)
            Command.objects.filter(OPEN).update(start_by=past, end_by=past)
        self.follow(lambda: outcomes.expire() | outcomes.settle())
        assert not Command.objects.filter(OPEN, op="attach", exclusive=True).exists()

    def follow(self, work: object) -> None:
        """Whatever ends, ends what waited for it, by a legal step."""
        before = {uuid for uuid, state in self.states.items() if state == _R.BIND_STARTED}
        while work():  # type: ignore[operator]
            pass
        for uuid in before:
            self.states[uuid] = _R(AcceleratorRequest.objects.get(uuid=uuid).state)
            assert self.states[uuid] in {_R.BIND_STARTED} | REQUEST_MOVES[_R.BIND_STARTED] - {_R.UNBOUND}

    @rule()
    def deadlines_pass(self) -> None:
        with conductor.writing():
            AcceleratorRequest.objects.filter(state="BindStarted").update(
                deadline=datetime.now(UTC) - timedelta(seconds=1)
            )
        assert binding.expire() is False
        started = [uuid for uuid, state in self.states.items() if state == _R.BIND_STARTED]
        self.states |= dict.fromkeys(started, _R.BIND_FAILED)

    def image(self, uuid: str) -> str:
        group = AcceleratorRequest.objects.get(uuid=uuid).group
        found: str = group.get("accel:function_id") or group.get("accel:bitstream_id", "")
        return found

    def free(self, card: int) -> int:
        handles = AttachHandle.objects.filter(deployable__rp_uuid=self.providers[card], request__isnull=True)
        return handles.filter(deployable__device__state="ready", deployable__device__busy_with__isnull=True).count()

    @invariant()
    def what_is_stored_is_what_should_be(self) -> None:
        if not hasattr(self, "states"):
            return
        stored = {str(r.uuid): r for r in AcceleratorRequest.objects.all()}
        assert {uuid: r.state for uuid, r in stored.items()} == self.states
        for request in stored.values():
            holds = request.state in ("BindStarted", "Bound")
            assert (request.attach_handle_id is not None) is holds
            assert (request.deadline is not None) is (request.state == "BindStarted")
            assert (request.instance_uuid is not None) is (holds or request.state == "BindFailed")
            assert bool(request.fault) is (request.state == "BindFailed")

    @invariant()
    def S1_what_has_a_device_for_itself_shares_it_with_nobody(self) -> None:
        for device in Device.objects.all():
            alone = Command.objects.filter(OPEN, device=device, exclusive=True)
            assert [command.uuid for command in alone] == ([device.busy_with] if device.busy_with else [])
            holders = AcceleratorRequest.objects.filter(attach_handle__deployable__device=device)
            for command in alone:
                consumer = command.arguments.get("consumer")
                assert {str(holder.instance_uuid) for holder in holders} <= ({consumer} if consumer else set())
                assert not holders.filter(state="Bound").exists()

    @invariant()
    def L2_what_waits_waits_for_a_command(self) -> None:
        for request in AcceleratorRequest.objects.filter(state="BindStarted"):
            own = Q(request=request.uuid, op="attach")
            shared = Q(
                exclusive=True, device__deployables=request.deployable, arguments__consumer=str(request.instance_uuid)
            )
            assert Command.objects.filter(OPEN).filter(own | shared).exists()

    @invariant()
    def what_was_made_on_a_host_and_is_not_held_is_ordered_back(self) -> None:
        for command in Command.objects.filter(op="attach", outcome="succeeded", ended_at__isnull=False):
            held = AcceleratorRequest.objects.filter(uuid=command.request, state__in=["BindStarted", "Bound"])
            if command.arguments["handle"]["attach_type"] in ON_HOST and not held.exists():
                assert Command.objects.filter(op="detach", request=command.request, id__gt=command.id).exists()

    def teardown(self) -> None:
        with conductor.writing():
            for model in (
                Command,
                AcceleratorRequest,
                DeviceProfile,
                Attribute,
                AttachHandle,
                Deployable,
                Device,
                Intent,
            ):
                model.objects.all().delete()


@pytest.mark.django_db
def test_no_order_of_calls_leads_to_an_illegal_state() -> None:
    run_state_machine_as_test(Requests, settings=settings(max_examples=5, stateful_step_count=15, deadline=None))
