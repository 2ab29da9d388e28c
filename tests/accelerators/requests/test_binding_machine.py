"""Test requests, released handles and the commands that they wait for with random sequences of calls (promises S1, S2,
L2).

No sequence may store an illegal state, and no request may wait without end.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import UUID, uuid4

import msgspec
import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import TYPES_CREATED_ON_HOST, CommandAnswer
from accelerators.devices import lifecycle
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import RequestState
from accelerators.models import (
    AcceleratorRequest,
    Command,
    Deployable,
    ReleasedHandle,
)
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.requests import binding, profiles
from accelerators.requests.binding import BindSpec
from accelerators.workflows import command_endings, release_checks
from tests.support.long import few_or_many, scaled
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.requests import NOVA, create_profiles, offer_devices

IMAGE = str(uuid4())
PROFILES = {
    "plain": {},
    "function": {"accel:function_id": "f"},
    "bitstream": {"accel:bitstream_id": IMAGE},
}
"""The device profiles: name → properties that it asks for, besides one FPGA."""
_R = RequestState
BINDABLE = frozenset({_R.INITIAL, _R.UNBOUND})
"""The states from which a bind may start (design.md section 4; contract section 4.1)."""
ENDS_OF_A_WAIT = frozenset({_R.BOUND, _R.BIND_FAILED})
"""The states that a request can have after BindStarted, unless it is unbound."""


HEALTHS = ("ok", "ok", "degraded", "failed", "unknown")
STATES_WITH_A_HANDLE = frozenset({"BindStarted", "Bound"})
READ_STORED_SQL = """
SELECT json_build_object(
  'requests', (SELECT coalesce(json_agg(json_build_array(r.uuid, r.state, h.uuid, d.id, r.deadline IS NOT NULL,
      r.instance_uuid, r.fault <> '')), '[]')
    FROM accelerators_acceleratorrequest r LEFT JOIN accelerators_attachhandle h ON h.id = r.attach_handle_id
    LEFT JOIN accelerators_deployable p ON p.id = r.deployable_id
    LEFT JOIN accelerators_device d ON d.id = p.device_id),
  'handles', (SELECT json_agg(json_build_array(h.uuid, p.device_id))
    FROM accelerators_attachhandle h JOIN accelerators_deployable p ON p.id = h.deployable_id),
  'devices', (SELECT json_agg(json_build_array(id, uuid, state, status, busy_with,
      (SELECT bitstream_id FROM accelerators_deployable p WHERE p.device_id = d.id)) ORDER BY id)
    FROM accelerators_device d),
  'commands', (SELECT coalesce(json_agg(json_build_array(id, uuid, op, device_id, exclusive, request,
      arguments->>'consumer', arguments->'handle'->>'attach_type', ended_at IS NULL, answered_at IS NULL,
      outcome = 'succeeded', arguments->>'uuid') ORDER BY id), '[]')
    FROM accelerators_command),
  'released', (SELECT coalesce(json_agg(h.uuid), '[]')
    FROM accelerators_releasedhandle w JOIN accelerators_attachhandle h ON h.id = w.handle_id))::text
"""
"""Reads everything that rules and invariants need in one statement, so that most of the time is the product's."""


class StoredRequest(NamedTuple):
    uuid: str
    state: str
    handle: str | None
    device: int | None
    has_deadline: bool
    instance: str | None
    has_fault: bool


class StoredDevice(NamedTuple):
    id: int
    uuid: str
    state: str
    health: str
    busy_with: str | None
    bitstream: str | None


class StoredCommand(NamedTuple):
    """A row of the table of commands."""

    id: int
    uuid: str
    op: str
    device: int | None
    exclusive: bool
    request: str | None
    consumer: str | None
    handle_type: str | None
    is_open: bool
    is_unanswered: bool
    succeeded: bool
    handle: str | None


class StoredState(msgspec.Struct, frozen=True):
    """The rows that are stored after a step."""

    requests: list[StoredRequest]
    handles: list[tuple[str, int]]
    """Uuid of the handle, and id of its device."""
    devices: list[StoredDevice]
    commands: list[StoredCommand]
    released: list[str]
    """Uuids of the handles that were released and that their host has not confirmed as unused."""


def read_stored() -> StoredState:
    """Read the stored rows."""
    with connection.cursor() as cursor:
        cursor.execute(READ_STORED_SQL)
        return msgspec.json.decode(cursor.fetchone()[0], type=StoredState)


def make_cards() -> list[str]:
    """Store two ready cards with two handles each, and return their providers.

    The handles of the first card are PCI; those of the second have to be created on the host.
    """
    report_cards("ok", "ok")
    offer_devices()
    create_profiles(**PROFILES)
    return [str(provider) for provider in Deployable.objects.order_by("id").values_list("rp_uuid", flat=True)]


def report_cards(*health: str) -> None:
    """Apply a report in which the two cards have this health."""
    cards = [make_card(n, 2, acts="detach reset", status=word) for n, word in enumerate(health, 1)]
    (part,) = cards[1].deployables
    made_on_host = tuple(msgspec.structs.replace(one, attach_type="MDEV") for one in part.handles)
    part = msgspec.structs.replace(part, handles=made_on_host)
    cards[1] = msgspec.structs.replace(cards[1], deployables=(part,))
    host = get_or_create_host("cmp1")
    assert apply_report(host, make_driver_report(*cards), seq=host.applied_seq + 1) == 1


class RequestsMachine(RuleBasedStateMachine):
    """Requests and commands of two cards. `expected_states` is the model that the stored requests are compared with."""

    providers: list[str]
    """Set by the test, which creates the cards once; each example is rolled back."""
    made = Bundle("made")

    @initialize()
    def start_example(self) -> None:
        self.before = transaction.savepoint()
        self.expected_states: dict[str, RequestState] = {}
        self.profiles: dict[str, str] = {}
        self.stored = read_stored()

    @rule(target=made, profile=st.sampled_from(sorted(PROFILES)))
    def create(self, profile: str) -> str:
        (uuid,) = binding.create_requests(profile, NOVA)
        self.expected_states[uuid], self.profiles[uuid] = _R.INITIAL, profile
        return uuid

    @precondition(lambda self: self.list_closed_cards())
    @rule(target=made, profile=st.sampled_from(sorted(PROFILES)), which=st.integers(0, 1))
    def bind_to_a_card_that_is_not_ready_or_busy(self, profile: str, which: int) -> str:
        """Bind a new request to a card with free handles, so that only the card's state can refuse the bind."""
        uuid, closed = self.create(profile), self.list_closed_cards()
        self.bind_and_check([uuid], closed[which % len(closed)])
        return uuid

    @rule(uuids=st.lists(made, min_size=1, max_size=3, unique=True), card=st.integers(0, 1))
    def bind(self, uuids: list[str], card: int) -> None:
        self.bind_and_check(uuids, card)

    def bind_and_check(self, uuids: list[str], card: int) -> None:
        """Bind these requests in one call, and check that the bind is refused exactly when it must be."""
        instance, device = str(uuid4()), self.stored.devices[card]
        images = {image for uuid in uuids if (image := self.get_wanted_image(uuid)) and image != device.bitstream}
        held = any(one.device == device.id and one.state in STATES_WITH_A_HANDLE for one in self.stored.requests)
        held = held or self.has_released_function(device)
        possible = self.count_offered_handles(device) >= len(uuids) and len(images) < 2 and not (images and held)
        legal = BINDABLE.issuperset(self.expected_states[uuid] for uuid in uuids)
        try:
            binding.bind_requests([BindSpec(uuid, "cmp1", self.providers[card], instance) for uuid in uuids], NOVA)
        except RefusedError as refused:
            if not legal:
                assert refused.reason == RefusalReason.WRONG_STATE
                return
            assert refused.reason == RefusalReason.NONE_FREE
            assert not possible
            self.expected_states |= dict.fromkeys(uuids, _R.BIND_FAILED)
            return
        assert legal and possible
        self.expected_states |= dict.fromkeys(uuids, _R.BIND_STARTED if images or card == 1 else _R.BOUND)

    @rule(uuids=st.lists(made, min_size=1, max_size=3, unique=True))
    def unbind(self, uuids: list[str]) -> None:
        binding.unbind_requests(uuids, NOVA)
        self.expected_states |= dict.fromkeys(uuids, _R.UNBOUND)

    @rule(uuid=consumes(made))
    def delete(self, uuid: str) -> None:
        binding.delete_requests([uuid], NOVA)
        del self.expected_states[uuid]

    @rule(card=st.integers(0, 1), offer=st.booleans())
    def offer(self, card: int, offer: bool) -> None:
        device = self.stored.devices[card]
        if offer and device.state == "quarantined":
            lifecycle.apply_action_to_device(Action.RELEASE, UUID(device.uuid), NOVA)
        try:
            (lifecycle.enable_device if offer else lifecycle.disable_device)(UUID(device.uuid), NOVA)
        except RefusedError as refused:
            assert offer and device.busy_with and refused.reason == RefusalReason.CONFLICT

    @rule(first=st.sampled_from(HEALTHS), second=st.sampled_from(HEALTHS))
    def a_report_shows_the_health(self, first: str, second: str) -> None:
        report_cards(first, second)
        for device, before, reported in zip(read_stored().devices, self.stored.devices, (first, second), strict=True):
            lasts = (before.health, reported) == ("failed", "unknown")
            assert device.health == ("failed" if lasts else reported)

    @rule(card=st.integers(0, 1))
    def reset(self, card: int) -> None:
        device = self.stored.devices[card]
        held = any(one.handle and one.device == device.id for one in self.stored.requests)
        held = held or self.has_released_function(device)
        try:
            command_queue.order_device_command("reset", UUID(device.uuid), NOVA)
        except RefusedError as refused:
            assert refused.reason == (RefusalReason.CONFLICT if device.busy_with else RefusalReason.IN_USE)
            assert held or device.busy_with
        else:
            assert not held and not device.busy_with

    @precondition(lambda self: any(one.is_open for one in self.stored.commands))
    @rule(which=st.integers(0, 5), outcome=st.sampled_from(["succeeded", "succeeded", "failed", "refused", "unknown"]))
    def an_agent_answers(self, which: int, outcome: str) -> None:
        waiting = list(Command.objects.filter(COMMAND_IS_OPEN).order_by("id"))
        command = waiting[which % len(waiting)]
        if command.state == "preparing":
            if outcome == "refused":
                command_queue.mark_image_failed(command.id, "there is no such image")
            else:
                command_queue.mark_image_ready(command.id, {"id": IMAGE, "size": 1, "sha256": "a" * 64})
        else:
            assert not command_queue.store_answers([CommandAnswer(command.host_id, command.id, outcome, "as it is")])
        self.settle_and_follow(command_endings.end_answered_commands)

    @precondition(lambda self: self.stored.released)
    @rule(overdue=st.booleans())
    def the_hosts_are_asked_again(self, overdue: bool) -> None:
        with conductor.writing():
            past = datetime.now(UTC) - timedelta(seconds=1)
            ReleasedHandle.objects.update(ask_at=past, **({"ask_until": past} if overdue else {}))
        assert release_checks.ask_hosts_again() is False
        after = read_stored()
        assert sorted(after.released) == sorted(self.stored.released), "only an answer gives a handle free"
        asked = {one.handle for one in after.commands if one.is_open and one.op == "detach"}
        assert asked.issuperset(after.released)

    @precondition(lambda self: any(one.is_open for one in self.stored.commands))
    @rule()
    def commands_run_out_of_time(self) -> None:
        with conductor.writing():
            past = datetime.now(UTC) - timedelta(seconds=1)
            Command.objects.filter(COMMAND_IS_OPEN).update(start_by=past, end_by=past)
        self.settle_and_follow(lambda: command_endings.end_late_commands() | command_endings.end_answered_commands())
        left = [one for one in read_stored().commands if one.is_open]
        assert not [one for one in left if one.op == "attach" and one.exclusive]

    def settle_and_follow(self, work: Callable[[], bool]) -> None:
        """Run `work` until it is idle. Check that a request in BindStarted stays there or ends Bound or BindFailed."""
        while work():
            pass
        after = {one.uuid: _R(one.state) for one in read_stored().requests}
        for uuid in [uuid for uuid, state in self.expected_states.items() if state == _R.BIND_STARTED]:
            self.expected_states[uuid] = after[uuid]
            assert after[uuid] in {_R.BIND_STARTED} | ENDS_OF_A_WAIT

    @precondition(lambda self: _R.BIND_STARTED in self.expected_states.values())
    @rule()
    def deadlines_pass(self) -> None:
        with conductor.writing():
            AcceleratorRequest.objects.filter(state="BindStarted").update(
                deadline=datetime.now(UTC) - timedelta(seconds=1)
            )
        assert binding.fail_overdue_binds() is False
        started = [uuid for uuid, state in self.expected_states.items() if state == _R.BIND_STARTED]
        self.expected_states |= dict.fromkeys(started, _R.BIND_FAILED)

    def get_wanted_image(self, uuid: str) -> str:
        group = PROFILES[self.profiles[uuid]]
        return group.get("accel:function_id") or group.get("accel:bitstream_id", "")

    def count_offered_handles(self, device: StoredDevice) -> int:
        if device.state != "ready" or device.health == "failed" or device.busy_with:
            return 0
        return self.count_unheld_handles(device)

    def count_unheld_handles(self, device: StoredDevice) -> int:
        taken = {one.handle for one in self.stored.requests} | {*self.stored.released}
        return len([uuid for uuid, of in self.stored.handles if of == device.id and uuid not in taken])

    def has_released_function(self, device: StoredDevice) -> bool:
        """Return whether a guest may still use a PCI function of the device; only the first card has PCI functions."""
        is_first = device.id == self.stored.devices[0].id
        return is_first and any(of == device.id and uuid in self.stored.released for uuid, of in self.stored.handles)

    def list_closed_cards(self) -> list[int]:
        """Return the indexes of the cards that offer nothing although some of their handles are free."""
        cards = enumerate(self.stored.devices)
        return [
            place for place, card in cards if not self.count_offered_handles(card) and self.count_unheld_handles(card)
        ]

    @invariant()
    def stored_rows_are_consistent(self) -> None:
        held_before = {one.handle for one in self.stored.requests if one.state == "Bound"}
        self.stored = read_stored()
        self.S1_check_handles_are_released_or_held(held_before)
        self.check_stored_states_and_holders()
        self.S1_check_exclusive_commands_share_no_device()
        self.L2_check_each_waiting_request_has_an_open_command()
        self.check_unheld_attachments_are_detached()

    def check_stored_states_and_holders(self) -> None:
        assert {one.uuid: one.state for one in self.stored.requests} == self.expected_states
        for one in self.stored.requests:
            holds = one.state in STATES_WITH_A_HANDLE
            assert (one.handle is not None) is holds
            assert one.has_deadline is (one.state == "BindStarted")
            assert (one.instance is not None) is (holds or one.state == "BindFailed")
            assert one.has_fault is (one.state == "BindFailed")
        held = [one.handle for one in self.stored.requests if one.handle]
        assert len(held) == len(set(held)), "S2: one handle, one request"

    def S1_check_handles_are_released_or_held(self, held_before: set[str | None]) -> None:
        """Check that a handle that an instance had is free only after its host has confirmed it."""
        held = {one.handle for one in self.stored.requests if one.handle}
        assert not held & {*self.stored.released}
        assert held_before <= held | {*self.stored.released}

    def S1_check_exclusive_commands_share_no_device(self) -> None:
        for device in self.stored.devices:
            alone = [one for one in self.stored.commands if one.is_open and one.exclusive and one.device == device.id]
            assert [one.uuid for one in alone] == ([device.busy_with] if device.busy_with else [])
            holders = [one for one in self.stored.requests if one.handle and one.device == device.id]
            for command in alone:
                assert {one.instance for one in holders} <= ({command.consumer} if command.consumer else set())
                assert not [one for one in holders if one.state == "Bound"]

    def L2_check_each_waiting_request_has_an_open_command(self) -> None:
        for one in self.stored.requests:
            if one.state == "BindStarted":
                assert [
                    command
                    for command in self.stored.commands
                    if command.is_open
                    and (
                        (command.op == "attach" and command.request == one.uuid)
                        or (command.exclusive and command.device == one.device and command.consumer == one.instance)
                    )
                ]

    def check_unheld_attachments_are_detached(self) -> None:
        held = {one.uuid for one in self.stored.requests if one.state in STATES_WITH_A_HANDLE}
        for one in self.stored.commands:
            made = one.op == "attach" and one.succeeded and not one.is_open and one.handle_type in TYPES_CREATED_ON_HOST
            if made and one.request not in held:
                later = [(other.op, other.request) for other in self.stored.commands if other.id > one.id]
                assert ("detach", one.request) in later

    def teardown(self) -> None:
        if hasattr(self, "before"):
            transaction.savepoint_rollback(self.before)


STEPS_PER_EXAMPLE = scaled(22, 50)
"""A step costs about 6 ms of CPU, most of it in the product."""


@few_or_many(4, scaled(20, 1000))
@pytest.mark.django_db
@pytest.mark.slow
def test_no_sequence_of_calls_stores_an_illegal_state(examples: int) -> None:
    RequestsMachine.providers = make_cards()
    profiles.clear_profile_cache()
    checked = settings(
        max_examples=examples,
        stateful_step_count=STEPS_PER_EXAMPLE,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(RequestsMachine, settings=checked)
