"""Whatever is done, in whatever order: events alone, folded from the first one on, say how everything stands (X6)."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db import transaction
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from accelerators import binding, commands, conductor, lifecycle, outcomes, profiles, rules, sweep
from accelerators.actions import Action
from accelerators.binding import Bind
from accelerators.caller import Caller
from accelerators.commands import Answer
from accelerators.models import AcceleratorRequest, AdmissionRule, Command, Deployable, Device, DeviceProfile, Host
from accelerators.models.commands import OPEN
from accelerators.refusals import Refused
from accelerators.replay import Told, fold
from accelerators.states import Drain
from drivers.inventory import Device as Card
from tests.support.replayed import stored, told
from tests.support.reports import a_host, answer, apply, card

NOVA = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
IMAGE = {"id": str(uuid4()), "size": 1, "sha256": "a" * 64}
SIZES = st.integers(0, 3)
"""Of each of two cards: how many handles it is reported with; 0: not at all."""


class Everything(RuleBasedStateMachine):
    """Two hosts of two cards; people, Nova and agents do what they do."""

    @initialize()
    def begin(self) -> None:
        self.before = transaction.savepoint()
        self.hosts = [a_host(f"cmp-{uuid4()}") for _ in range(2)]
        self.seq = 0
        for host in self.hosts:
            self.report(host, 2, 2, "ok")

    def report(self, host: Host, one: int, two: int, health: str) -> None:
        self.seq += 1
        cards: list[Card] = [
            card(bus, size, status=health, acts="reset program", to_install="" if bus == 1 else "bind it")
            for bus, size in ((1, one), (2, two))
            if size
        ]
        apply(host, answer(*cards), seq=self.seq)

    @rule(which=st.integers(0, 1), one=SIZES, two=SIZES, health=st.sampled_from(["ok", "degraded", "failed"]))
    def an_agent_reports(self, which: int, one: int, two: int, health: str) -> None:
        self.report(self.hosts[which], one, two, health)

    @rule(data=st.data(), action=st.sampled_from(Action), then=st.sampled_from(Drain))
    def a_person_decides(self, data: st.DataObject, action: Action, then: Drain) -> None:
        devices = list(Device.objects.order_by("id").values_list("uuid", flat=True))
        if devices:
            lifecycle.act(
                action, data.draw(st.lists(st.sampled_from(devices), min_size=1, unique=True)), NOVA, then=then
            )

    @rule(programs=st.booleans(), label=st.text("abc", max_size=2))
    def a_profile_is_made_or_edited(self, programs: bool, label: str) -> None:
        group = {"resources:FPGA": "1"} | ({"accel:bitstream_id": IMAGE["id"]} if programs else {})
        unused = DeviceProfile.objects.filter(requests__isnull=True).first()
        if unused and label:
            profiles.edit(unused.uuid, {"groups": [group], "description": label}, NOVA)
        elif unused and DeviceProfile.objects.count() > 2:
            profiles.delete(unused.uuid, NOVA)
        else:
            profiles.create(f"p-{uuid4()}", [group], label or None, None, NOVA)

    @rule(enabled=st.booleans(), data=st.data())
    def a_rule_is_made_edited_or_deleted(self, enabled: bool, data: st.DataObject) -> None:
        there = list(AdmissionRule.objects.order_by("id"))
        if len(there) < 2:
            made = {"name": f"r-{uuid4()}", "driver": "test_*", "action": "ready", "enabled": enabled}
            rules.create(made, NOVA)
        elif enabled:
            rules.edit(data.draw(st.sampled_from(there)).uuid, {"action": "quarantined", "order": 7}, NOVA)
        else:
            rules.delete(there[0].uuid, NOVA)

    @rule()
    def the_rules_are_applied(self) -> None:
        list(rules.apply(NOVA))

    @rule(data=st.data(), project=st.sampled_from(["", "p2"]))
    def a_request_is_made_and_bound(self, data: st.DataObject, project: str) -> None:
        names = list(DeviceProfile.objects.order_by("id").values_list("name", flat=True))
        offers = list(Deployable.objects.filter(rp_uuid__isnull=False).order_by("id"))
        if names and offers:
            profiles.forget()
            uuids = binding.create(data.draw(st.sampled_from(names)), NOVA)
            rp, instance = str(data.draw(st.sampled_from(offers)).rp_uuid), str(uuid4())
            with suppress(Refused):  # it says so itself: BindFailed
                binding.bind([Bind(uuid, "cmp", rp, instance, project) for uuid in uuids], NOVA)

    @rule(data=st.data(), ends=st.booleans())
    def a_request_is_unbound_or_deleted(self, data: st.DataObject, ends: bool) -> None:
        there = list(AcceleratorRequest.objects.order_by("id").values_list("uuid", flat=True))
        if there:
            (binding.delete if ends else binding.unbind)([str(data.draw(st.sampled_from(there)))], NOVA)

    @rule(data=st.data(), outcome=st.sampled_from(["succeeded", "succeeded", "failed", "refused", "unknown"]))
    def an_agent_answers(self, data: st.DataObject, outcome: str) -> None:
        waiting = list(Command.objects.filter(OPEN, answered_at__isnull=True).order_by("id"))
        if waiting:
            command = data.draw(st.sampled_from(waiting))
            if command.state == "preparing":
                commands.prepared(command.id, IMAGE)
            commands.answer([Answer(command.host_id, command.id, outcome, "as it is")])
            while outcomes.settle():
                pass

    @rule()
    def time_passes(self) -> None:
        with conductor.writing():
            past = datetime.now(UTC) - timedelta(seconds=1)
            Command.objects.filter(OPEN, answered_at__isnull=True).update(start_by=past, end_by=past)
            AcceleratorRequest.objects.filter(state="BindStarted").update(deadline=past)
        while outcomes.expire() | outcomes.settle() | binding.expire():
            pass
        sweep.remove_missing(datetime.now(UTC) + timedelta(days=2))

    @rule(which=st.integers(0, 1), silent=st.booleans())
    def an_agent_falls_silent_or_is_heard(self, which: int, silent: bool) -> None:
        conductor.mark_hosts([self.hosts[which].id], datetime.now(UTC) if silent else None)

    @invariant()
    def events_say_how_everything_stands(self) -> None:
        assert told() == stored()

    def teardown(self) -> None:
        transaction.savepoint_rollback(self.before)


@pytest.mark.django_db
def test_X6_events_replayed_are_what_is_stored() -> None:
    run_state_machine_as_test(Everything, settings=settings(max_examples=12, stateful_step_count=20, deadline=None))


def test_what_is_folded_goes_on_from_where_it_was() -> None:
    first = Told(
        "device.found", "device", "d", "h", {"state": [None, "inactive"], "deployable x": [None, 2], "odd": [0, 1]}
    )
    then = Told("device.ready", "device", "d", "h", {"state": ["inactive", "ready"]})
    state = fold([first])
    assert state["device"] == {"d": {"state": "inactive", "deployable x": 2}}
    assert (
        fold([then, Told("list.exported", "list", "", "", {"rows": [None, 3]})], state)["device"]["d"]["state"]
        == "ready"
    )
    assert fold([Told("device.removed", "device", "d", "h", {})], state)["device"] == {}
