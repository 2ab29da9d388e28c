"""Test the life cycle of devices: every action from every state, drains, actions on many devices, and holder checks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from uuid import uuid4

import psycopg
import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from accelerators import conductor, safety
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import (
    Action,
    LifecycleState,
    possible_actions,
    state_after_action,
    state_after_last_request,
)
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceState, DrainTarget, EventSource, IllegalTransitionError
from accelerators.models import AcceleratorRequest, Deployable, Device, DeviceProfile, Event, Intent
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from tests.support.holders import answer_each
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.webserver import until

OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
NOVA = Caller("nova", "n", frozenset({"member"}), "p1", service=True)
OFFERED_STATES = {DeviceState.READY, DeviceState.INSTALLING}
TAKE_OUT_ACTIONS = (Action.DISABLE, Action.QUARANTINE, Action.DRAIN)

_D = DeviceState
DEVICE_MOVES: dict[DeviceState, frozenset[DeviceState]] = {
    _D.INACTIVE: frozenset({_D.INSTALLING, _D.READY, _D.QUARANTINED, _D.MISSING, _D.RETIRED}),
    _D.INSTALLING: frozenset({_D.READY, _D.FAILED, _D.MAINTENANCE, _D.QUARANTINED, _D.MISSING}),
    _D.READY: frozenset({_D.MAINTENANCE, _D.FAILED, _D.QUARANTINED, _D.MISSING}),
    _D.MAINTENANCE: frozenset(
        {_D.INSTALLING, _D.READY, _D.INACTIVE, _D.FAILED, _D.QUARANTINED, _D.MISSING, _D.RETIRED}
    ),
    _D.FAILED: frozenset(
        {_D.INACTIVE, _D.INSTALLING, _D.READY, _D.MAINTENANCE, _D.QUARANTINED, _D.MISSING, _D.RETIRED}
    ),
    _D.QUARANTINED: frozenset({_D.MAINTENANCE, _D.MISSING, _D.RETIRED}),
    _D.MISSING: frozenset(_D) - {_D.MISSING},
    _D.RETIRED: frozenset({_D.INACTIVE, _D.MISSING}),
}
"""State → the states that one step may lead to, as in the design; decisions of `actions` must stay within it."""

standings = st.builds(
    LifecycleState,
    st.sampled_from(DeviceState),
    st.none() | st.sampled_from([s for s in DeviceState if s != DeviceState.MISSING]),
    st.none(),
    st.integers(0, 2),
).map(lambda s: s if s.state == DeviceState.MISSING else LifecycleState(s.state, None, None, s.holding_requests))


@pytest.mark.parametrize(("state", "action"), [*product(DeviceState, Action)])
def test_every_action_from_every_state_is_a_legal_step_or_a_refusal(state: DeviceState, action: Action) -> None:
    for then, held in product(DrainTarget, (0, 2)):
        now = LifecycleState(state, holding_requests=held)
        try:
            after = state_after_action(action, now, then)
        except IllegalTransitionError as refused:
            assert action not in TAKE_OUT_ACTIONS, "taking out of offer was refused"
            assert str(state) in str(refused)
            assert action not in possible_actions(now)
            continue
        assert after.state == state or after.state in DEVICE_MOVES[state]
        assert state != DeviceState.RETIRED or after.drain_to is None, "it is retired already"
        if then is DrainTarget.MAINTENANCE and not (action is Action.RETIRE and held):
            assert (action in possible_actions(now)) == (after != now)


@given(standings, st.lists(st.tuples(st.sampled_from(Action), st.sampled_from(DrainTarget)), max_size=8))
def test_no_sequence_of_actions_offers_a_draining_device_or_moves_a_missing_one(
    start: LifecycleState, asked: list[tuple[Action, DrainTarget]]
) -> None:
    now = start
    for action, then in asked:
        try:
            after = state_after_action(action, now, then)
        except IllegalTransitionError:
            continue
        assert (after.state == DeviceState.MISSING) == (now.state == DeviceState.MISSING)
        assert after.drain_to is None or after.effective_state not in OFFERED_STATES
        assert (
            after.effective_state == now.effective_state or after.effective_state in DEVICE_MOVES[now.effective_state]
        )
        if after.drain_to:
            done = state_after_last_request(after)
            assert done.drain_to is None and (
                done.effective_state == after.drain_to or after.drain_to is DrainTarget.MAINTENANCE
            )
        now = after


@pytest.fixture
def device(db: None) -> Device:
    """Return a ready card with two handles."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=2)))
    found = Device.objects.get()
    lifecycle.enable_device(found.uuid, OLGA, "new")
    return Device.objects.get()


def create_bound_request(device: Device) -> str:
    """Create a request that is bound to one of the device's handles, and return its uuid."""
    with conductor.writing():
        DeviceProfile.objects.get_or_create(name="one", defaults={"groups": [{"resources:FPGA": "1"}]})
    (uuid,) = binding.create_requests("one", NOVA)
    provider = Deployable.objects.get(device=device).rp_uuid
    binding.bind_requests([BindSpec(uuid, device.host.name, str(provider), str(uuid4()))], NOVA)
    return uuid


def get_state_and_drain(device: Device) -> tuple[str, str | None]:
    device.refresh_from_db()
    return device.state, device.drain_to


def test_a_state_change_stores_and_records_who_made_it_when_and_why(device: Device) -> None:
    before = device.state_since
    result = lifecycle.apply_action_to_device(
        Action.QUARANTINE, device.uuid, OLGA, "smells of smoke", source=EventSource.PERSON
    )
    assert (result.outcome, result.state) == ("moved", "quarantined")
    device.refresh_from_db()
    assert (device.state_reason, device.state_by) == ("smells of smoke", "olga")
    assert device.state_since > before
    event = Event.objects.get(action="device.quarantined")
    assert (event.source, event.actor, event.reason) == ("person", "olga", "smells of smoke")
    assert (event.subject, event.subject_name) == (device.uuid, str(device))
    assert event.changes["state"] == ["ready", "quarantined"]
    was, is_now = event.changes["state_since"]
    assert (was[:19], is_now[:19]) == (before.isoformat()[:19], device.state_since.isoformat()[:19])
    assert Intent.objects.filter(kind="provider", key=str(device.host.uuid)).exists()


def test_a_device_can_be_disabled_quarantined_released_retired_and_reinstated(device: Device) -> None:
    path = [
        (Action.DISABLE, "maintenance"),
        (Action.QUARANTINE, "quarantined"),
        (Action.RELEASE, "maintenance"),
        (Action.RETIRE, "retired"),
        (Action.REINSTATE, "inactive"),
        (Action.ENABLE, "ready"),
    ]
    for action, state in path:
        assert lifecycle.apply_action_to_device(action, device.uuid, OLGA).outcome == "moved"
        assert get_state_and_drain(device) == (state, None)
        assert lifecycle.apply_action_to_device(action, device.uuid, OLGA).outcome == "unchanged"


def test_S1_retiring_a_held_device_is_refused_naming_the_holder(device: Device) -> None:
    request = create_bound_request(device)
    lifecycle.disable_device(device.uuid, OLGA)
    with pytest.raises(RefusedError, match=f"request {request} of instance") as refused:
        lifecycle.apply_action_to_device(Action.RETIRE, device.uuid, OLGA)
    assert refused.value.reason == RefusalReason.IN_USE
    assert get_state_and_drain(device) == ("maintenance", None)
    assert AcceleratorRequest.objects.get().state == "Bound"


def test_retiring_is_refused_while_a_holder_check_gets_no_answer(device: Device) -> None:
    unknown = safety.HolderCheckResult(unknown="it does not answer")
    with safety.HOLDER_CHECKS.replaced("placement", answer_each(lambda device: unknown)):
        lifecycle.disable_device(device.uuid, OLGA)
        with pytest.raises(RefusedError, match="placement: it does not answer") as refused:
            lifecycle.apply_action_to_device(Action.RETIRE, device.uuid, OLGA)
        assert refused.value.reason == RefusalReason.UNAVAILABLE
        assert (
            lifecycle.apply_action_to_device(Action.DRAIN, device.uuid, OLGA, drain_to=DrainTarget.RETIRED).text
            == "draining: 0 requests left"
        )
        lifecycle.run_drains()
        assert get_state_and_drain(device) == ("maintenance", "retired")
    lifecycle.run_drains()
    assert get_state_and_drain(device) == ("retired", None)


@pytest.mark.parametrize(("then", "end"), [(DrainTarget.MAINTENANCE, "maintenance"), (DrainTarget.RETIRED, "retired")])
def test_a_drain_keeps_bound_requests_and_ends_with_the_last_one(device: Device, then: DrainTarget, end: str) -> None:
    first, second = create_bound_request(device), create_bound_request(device)
    drain_result = lifecycle.apply_action_to_device(Action.DRAIN, device.uuid, OLGA, "worn out", then)
    assert (drain_result.state, drain_result.text) == ("maintenance", "draining: 2 requests left")
    assert lifecycle.apply_action_to_device(Action.DRAIN, device.uuid, OLGA, "worn out", then).outcome == "unchanged"
    binding.unbind_requests([first], NOVA)
    lifecycle.run_drains()
    assert get_state_and_drain(device) == ("maintenance", then)
    binding.delete_requests([second], NOVA)
    lifecycle.run_drains()
    assert get_state_and_drain(device) == (end, None)
    assert (device.state_by, "worn out" in device.state_reason) == ("olga", True)
    last = Event.objects.filter(subject=device.uuid).order_by("-id").first()
    assert (last.source, last.actor) == ("system", "drains")
    assert last.action == ("device.retired" if then is DrainTarget.RETIRED else "device.drained")
    assert last.reason == "its last request is gone; olga: worn out"
    assert last.changes["drain_to"] == [then, None]


def test_a_free_device_is_drained_at_once(device: Device) -> None:
    assert (
        lifecycle.apply_action_to_device(Action.DRAIN, device.uuid, OLGA, drain_to=DrainTarget.RETIRED).state
        == "retired"
    )
    assert get_state_and_drain(device) == ("retired", None)
    actions = Event.objects.filter(subject=device.uuid).order_by("id").values_list("action", flat=True)
    assert list(actions) == ["device.found", "device.ready", "device.draining", "device.retired"]


def test_enabling_a_draining_device_ends_the_drain(device: Device) -> None:
    request = create_bound_request(device)
    lifecycle.apply_action_to_device(Action.DRAIN, device.uuid, OLGA, drain_to=DrainTarget.RETIRED)
    lifecycle.enable_device(device.uuid, OLGA, "needed after all")
    binding.delete_requests([request], NOVA)
    lifecycle.run_drains()
    assert get_state_and_drain(device) == ("ready", None)
    assert Event.objects.filter(action="device.ready").first().changes["drain_to"] == ["retired", None]


def test_an_action_on_a_missing_device_takes_effect_when_it_returns(device: Device) -> None:
    host, request = device.host, create_bound_request(device)
    apply_report(host, make_driver_report(), seq=2)
    lifecycle.apply_action_to_device(Action.DRAIN, device.uuid, OLGA, "pulled", DrainTarget.RETIRED)
    device.refresh_from_db()
    assert (device.state, device.returns_to, device.drain_to) == ("missing", "maintenance", "retired")
    assert device.state_reason == "test_driver no longer reports this device"
    binding.delete_requests([request], NOVA)
    lifecycle.run_drains()
    device.refresh_from_db()
    assert (device.state, device.returns_to, device.drain_to) == ("missing", "retired", None)
    apply_report(host, make_driver_report(make_card(1, handles=2)), seq=3)
    assert get_state_and_drain(device) == ("retired", None)


def test_many_devices_are_moved_in_a_constant_number_of_statements_each_with_its_result(
    db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(4):
        apply_report(get_or_create_host(f"cmp{n}"), make_driver_report(*(make_card(bus) for bus in range(15))))
    uuids = list(Device.objects.order_by("?").values_list("uuid", flat=True))
    lifecycle.apply_action_to_device(Action.RETIRE, uuids[0], OLGA)
    nowhere = uuid4()
    sent: list[str] = []
    execute = psycopg.Cursor.execute
    with monkeypatch.context() as patch:
        patch.setattr(
            psycopg.Cursor, "execute", lambda self, query, *a, **k: sent.append(query) or execute(self, query, *a, **k)
        )
        lifecycle.apply_action(Action.QUARANTINE, uuids[1:3], OLGA)
        few = len(sent)
        results = lifecycle.apply_action(Action.RELEASE, [*uuids, nowhere], OLGA)
    few, all_ = ([query for query in part if "SAVEPOINT" not in str(query)] for part in (sent[:few], sent[few:]))
    assert len(all_) <= len(few) <= 9
    assert [result.outcome for result in results[:4]] == ["refused", "moved", "moved", "refused"]
    results = lifecycle.apply_action(Action.ENABLE, [*uuids, nowhere], OLGA)
    assert [result.uuid for result in results] == [*uuids, nowhere]
    assert [result.outcome for result in results[:3]] == ["refused", "moved", "moved"]
    assert (results[0].reason, results[-1].reason) == (RefusalReason.CONFLICT, RefusalReason.NOT_FOUND)
    assert Device.objects.filter(state="ready").count() == 59
    assert Deployable.objects.filter(rp_uuid__isnull=False).count() == 60
    assert Event.objects.filter(action="device.ready").count() == 59


def test_a_reason_that_is_too_long_or_contains_nul_is_refused(device: Device) -> None:
    for bad in ("x" * 501, "a\0b"):
        with pytest.raises(RefusedError) as refused:
            lifecycle.disable_device(device.uuid, OLGA, bad)
        assert refused.value.reason == RefusalReason.INVALID


@pytest.mark.django_db(transaction=True)
def test_an_action_committed_while_a_merge_waits_is_not_undone_by_the_merge() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1)))
    device = Device.objects.get()
    lifecycle.enable_device(device.uuid, OLGA)
    with ThreadPoolExecutor(1) as thread:
        with conductor.writing():
            lifecycle.apply_action_to_device(Action.QUARANTINE, device.uuid, OLGA, "smoke")
            merge = thread.submit(_run_and_close_connection, lambda: apply_report(host, make_driver_report(), seq=2))
            until(_is_anyone_waiting_for_a_lock)
        assert merge.result(20) == 1
    device.refresh_from_db()
    assert (device.state, device.returns_to) == ("missing", "quarantined")


def _run_and_close_connection(work: Callable[[], int]) -> int:
    try:
        return work()
    finally:
        connection.close()


def _is_anyone_waiting_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
        return bool(cursor.fetchone()[0])
