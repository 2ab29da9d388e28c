"""Test that a failed bind explains itself: in the log, in the metric, in its event, and by a look at Placement."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from accelerators import conductor, refusal_counts
from accelerators.domain.bind_failures import ADVICE, REFUSAL_BY_FAILURE, BindFailure
from accelerators.domain.caller import request_id
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AcceleratorRequest, AttachHandle, Device, Event, Intent
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from accelerators.runtime import metrics
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.requests import NOVA, bind_new_requests, create_profiles, offer_devices

pytestmark = pytest.mark.django_db
PROVIDER, LEFT_BEHIND, INSTANCE = (str(uuid4()) for _ in range(3))


@pytest.fixture(autouse=True)
def _ready_card() -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=1)))
    offer_devices(PROVIDER)
    create_profiles(plain={}, both={"accel:bitstream_id": INSTANCE, "accel:function_id": "adder"})


def count_failures(failure: BindFailure) -> float:
    """Return how many binds failed for this reason so far."""
    return metrics.REGISTRY.get_sample_value("cyborg_bind_failures_total", {"reason": failure.value}) or 0.0


def fail_to_bind(
    capture_commits: Any, failure: BindFailure, profile: str = "plain", provider: str = PROVIDER, host: str = "cmp1"
) -> AcceleratorRequest:
    """Bind a new request, and check that it is refused and counted once for this reason; return the request."""
    (uuid,) = binding.create_requests(profile, NOVA)
    counted = count_failures(failure)
    with capture_commits(execute=True), pytest.raises(RefusedError) as refused:
        binding.bind_requests([BindSpec(uuid, host, provider, str(uuid4()))], NOVA)
    assert refused.value.reason is REFUSAL_BY_FAILURE[failure]
    assert count_failures(failure) == counted + 1
    return AcceleratorRequest.objects.get(uuid=uuid)


def test_a_bind_of_an_unknown_provider_is_logged_with_everything_that_finds_its_cause(
    django_capture_on_commit_callbacks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (uuid,) = binding.create_requests("plain", NOVA)
    token = request_id.set("req-42")
    try:
        with django_capture_on_commit_callbacks(execute=True), pytest.raises(RefusedError):
            binding.bind_requests([BindSpec(uuid, "cmp1", LEFT_BEHIND, INSTANCE)], NOVA)
    finally:
        request_id.reset(token)
    (line,) = (one.getMessage() for one in caplog.records if one.name == "accelerators.requests.binding")
    assert line == (
        f"the bind of request {uuid} failed (unknown_provider): instance {INSTANCE}, host 'cmp1', provider"
        f" {LEFT_BEHIND}, request id req-42: Deployable not found with resource provider uuid={LEFT_BEHIND}"
    )
    event = Event.objects.get(action="request.bind_failed")
    assert event.changes["failure"] == [None, "unknown_provider"]
    assert event.changes["device_rp_uuid"] == [None, LEFT_BEHIND]


def test_each_refusal_of_a_bind_is_counted_by_its_reason(django_capture_on_commit_callbacks: Any) -> None:
    capture = django_capture_on_commit_callbacks
    fail_to_bind(capture, BindFailure.UNKNOWN_PROVIDER, provider=LEFT_BEHIND)
    fail_to_bind(capture, BindFailure.OTHER_HOST, host="cmp2")
    fail_to_bind(capture, BindFailure.INVALID_GROUP, profile="both")
    with conductor.writing():
        Device.objects.update(state="maintenance")
    fail_to_bind(capture, BindFailure.NOT_OFFERED)
    with conductor.writing():
        Device.objects.update(state="ready", status="failed")
    fail_to_bind(capture, BindFailure.NOT_OFFERED)
    with conductor.writing():
        Device.objects.update(status="ok")
    (bound,) = bind_new_requests("plain", PROVIDER)
    fail_to_bind(capture, BindFailure.NONE_FREE)
    with conductor.writing():
        AttachHandle.objects.update(attach_type="DEV")
    fail_to_bind(capture, BindFailure.DEVICE_NODE)
    before = count_failures(BindFailure.WRONG_STATE), count_failures(BindFailure.UNKNOWN_REQUEST)
    with capture(execute=True), pytest.raises(RefusedError):
        binding.bind_requests([BindSpec(str(bound.uuid), "cmp1", PROVIDER, str(uuid4()))], NOVA)
    with capture(execute=True), pytest.raises(RefusedError):
        binding.bind_requests([BindSpec(str(uuid4()), "cmp1", PROVIDER, str(uuid4()))], NOVA)
    after = count_failures(BindFailure.WRONG_STATE), count_failures(BindFailure.UNKNOWN_REQUEST)
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]


def test_a_bind_past_its_deadline_is_logged_and_counted(
    django_capture_on_commit_callbacks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with conductor.writing():
        AttachHandle.objects.update(attach_type="MDEV")
    (request,) = bind_new_requests("plain", PROVIDER, INSTANCE)
    with conductor.writing():
        AcceleratorRequest.objects.update(deadline=datetime.now(UTC) - timedelta(seconds=1))
    counted = count_failures(BindFailure.DEADLINE)
    with django_capture_on_commit_callbacks(execute=True):
        binding.fail_overdue_binds()
    assert count_failures(BindFailure.DEADLINE) == counted + 1
    assert f"the bind of request {request.uuid} failed (deadline): instance {INSTANCE}, host 'cmp1'" in caplog.text


def test_a_bind_of_a_provider_that_no_device_has_lets_the_host_be_compared_with_placement() -> None:
    with conductor.writing():
        Intent.objects.all().delete()
    (uuid,) = binding.create_requests("plain", NOVA)
    with pytest.raises(RefusedError):
        binding.bind_requests([BindSpec(uuid, "cmp1", LEFT_BEHIND, INSTANCE)], NOVA)
    assert Intent.objects.get(kind="provider").key == str(Device.objects.get().host.uuid)


def test_a_failed_bind_keeps_the_progress_and_the_back_off_of_an_intent_that_its_host_has_already() -> None:
    host = str(Device.objects.get().host.uuid)
    due_at = datetime.now(UTC) + timedelta(seconds=60)
    with conductor.writing():
        conductor.raise_intents("provider", {host: {"host": "cmp1", "command": 7}})
        Intent.objects.filter(kind="provider").update(next_at=due_at, attempts=5)
    (uuid,) = binding.create_requests("plain", NOVA)
    with pytest.raises(RefusedError):
        binding.bind_requests([BindSpec(uuid, "cmp1", LEFT_BEHIND, INSTANCE)], NOVA)
    intent = Intent.objects.get(kind="provider")
    assert (intent.payload, intent.next_at, intent.attempts) == ({"host": "cmp1", "command": 7}, due_at, 5)


def test_a_write_that_is_refused_for_its_author_is_not_counted_as_an_unknown_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> None:
        raise RefusedError(RefusalReason.CONFLICT, "the rights were withdrawn")

    (uuid,) = binding.create_requests("plain", NOVA)
    counted = count_failures(BindFailure.UNKNOWN_REQUEST)
    with conductor.checking_writes(refuse), pytest.raises(RefusedError, match="the rights were withdrawn"):
        binding.bind_requests([BindSpec(uuid, "cmp1", PROVIDER, INSTANCE)], NOVA)
    assert count_failures(BindFailure.UNKNOWN_REQUEST) == counted
    assert "unknown_request" not in caplog.text


def refuse_to_bind(uuid: str, instance: str) -> None:
    """Bind the request, and check that it is refused."""
    with pytest.raises(RefusedError):
        binding.bind_requests([BindSpec(uuid, "cmp1", PROVIDER, instance)], NOVA)


def test_binds_that_are_refused_without_a_change_are_recorded_as_one_event_for_each_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal_counts.forget()
    (bound,) = bind_new_requests("plain", PROVIDER, INSTANCE)
    (free,) = binding.create_requests("plain", NOVA)
    events_before = Event.objects.count()
    for _ in range(50):
        refuse_to_bind(str(uuid4()), str(uuid4()))  # unknown_request
        refuse_to_bind(str(bound.uuid), str(uuid4()))  # wrong_state
        refuse_to_bind(free, INSTANCE)  # instance_has_requests

    def find_handles_locked(*arguments: Any) -> None:
        raise binding._HandlesContendedError

    monkeypatch.setattr(binding, "RETRY_TIMEOUT_S", 0)
    monkeypatch.setattr(binding, "_reserve_handles", find_handles_locked)
    token = request_id.set("req-42")
    try:
        refuse_to_bind(free, LEFT_BEHIND)  # contention
    finally:
        request_id.reset(token)
    assert Event.objects.count() == events_before, "a refusal writes no event itself"
    refusal_counts.record()
    events = {event.subject_name: event for event in Event.objects.filter(action="request.bind_refused")}
    assert {failure: event.changes["number"][1] for failure, event in events.items()} == {
        "unknown_request": 50,
        "wrong_state": 50,
        "instance_has_requests": 50,
        "contention": 1,
    }
    assert events.keys() == {failure.value for failure in BindFailure} - {
        failure.value for failure in binding.STORED_FAILURES | {BindFailure.HOST_FAILED, BindFailure.DEADLINE}
    }
    newest = events["contention"]
    assert newest.request_id == "req-42" and newest.reason.startswith("Others are taking the same accelerators")
    assert newest.changes == {
        "failure": [None, "contention"],
        "number": [None, 1],
        "uuid": [None, free],
        "hostname": [None, "cmp1"],
        "device_rp_uuid": [None, PROVIDER],
        "instance_uuid": [None, LEFT_BEHIND],
    }


def test_a_bind_that_fails_with_events_is_not_counted_as_refused_too() -> None:
    refusal_counts.forget()
    (uuid,) = binding.create_requests("plain", NOVA)
    with pytest.raises(RefusedError):
        binding.bind_requests([BindSpec(uuid, "cmp1", LEFT_BEHIND, INSTANCE)], NOVA)
    refusal_counts.record()
    assert not Event.objects.filter(action="request.bind_refused").exists()


def test_every_failure_has_advice() -> None:
    assert ADVICE.keys() == set(BindFailure)
