"""A state machine over requests: whatever is done in whatever order, nothing illegal is ever stored (S1, S2, L2)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
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

from accelerators import binding, conductor, lifecycle
from accelerators.binding import Bind
from accelerators.caller import Caller
from accelerators.models import AcceleratorRequest, AttachHandle, Deployable, Device, DeviceProfile, Intent
from accelerators.refusals import Reason, Refused
from accelerators.states import REQUEST_MOVES, RequestState
from tests.support.reports import a_host, answer, apply, card

NOVA = Caller("nova", "u", frozenset({"member"}), "p1", service=True)
PROFILES = {"plain": {"resources:FPGA": "1"}, "programmed": {"resources:FPGA": "1", "accel:function_id": "f"}}


class Requests(RuleBasedStateMachine):
    """Two cards of two handles each, one PCI and one whose handles are made on the host; a model beside them."""

    made = Bundle("made")

    @initialize()
    def begin(self) -> None:
        self.states: dict[str, RequestState] = {}
        apply(a_host(f"cmp-{uuid4()}"), answer(card(1, 2), card(2, 2)))
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
        self.states[uuid] = RequestState.INITIAL
        return uuid

    @rule(uuids=st.lists(made, min_size=1, max_size=3, unique=True), card=st.integers(0, 1))
    def bind(self, uuids: list[str], card: int) -> None:
        instance = str(uuid4())
        free = self.free(card)
        legal = all(RequestState.BIND_STARTED in REQUEST_MOVES[self.states[uuid]] for uuid in uuids)
        try:
            binding.bind([Bind(uuid, "cmp1", self.providers[card], instance) for uuid in uuids], NOVA)
        except Refused as refused:
            if not legal:
                assert refused.reason == Reason.STATE
                return
            assert refused.reason == Reason.NONE_FREE
            assert free < len(uuids)
            self.states |= dict.fromkeys(uuids, RequestState.BIND_FAILED)
            return
        assert legal and free >= len(uuids)
        for uuid in uuids:
            group = AcceleratorRequest.objects.get(uuid=uuid).group
            on_host = card == 1 or "accel:function_id" in group
            self.states[uuid] = RequestState.BIND_STARTED if on_host else RequestState.BOUND

    @rule(uuids=st.lists(made, min_size=1, max_size=3, unique=True))
    def unbind(self, uuids: list[str]) -> None:
        binding.unbind(uuids, NOVA)
        self.states |= dict.fromkeys(uuids, RequestState.UNBOUND)

    @rule(uuid=consumes(made))
    def delete(self, uuid: str) -> None:
        binding.delete([uuid], NOVA)
        del self.states[uuid]

    @rule(card=st.integers(0, 1), offer=st.booleans())
    def offer(self, card: int, offer: bool) -> None:
        device = Device.objects.get(deployables__rp_uuid=self.providers[card])
        (lifecycle.enable if offer else lifecycle.disable)(device.uuid, NOVA)

    @rule()
    def deadlines_pass(self) -> None:
        with conductor.writing():
            AcceleratorRequest.objects.filter(state="BindStarted").update(
                deadline=datetime.now(UTC) - timedelta(seconds=1)
            )
        assert binding.expire() is False
        started = [uuid for uuid, state in self.states.items() if state == RequestState.BIND_STARTED]
        self.states |= dict.fromkeys(started, RequestState.BIND_FAILED)

    def free(self, card: int) -> int:
        handles = AttachHandle.objects.filter(deployable__rp_uuid=self.providers[card], request__isnull=True)
        return handles.filter(deployable__device__state="ready").count()

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

    def teardown(self) -> None:
        with conductor.writing():
            AcceleratorRequest.objects.all().delete()
            DeviceProfile.objects.all().delete()
            for model in (AttachHandle, Deployable, Device, Intent):
                model.objects.all().delete()


@pytest.mark.django_db
def test_no_order_of_calls_leads_to_an_illegal_state() -> None:
    run_state_machine_as_test(Requests, settings=settings(max_examples=10, stateful_step_count=15, deadline=None))
