"""Test that Nova is notified at least once of every request, and that each of its answers is handled correctly."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from keystoneauth1.session import Session
from keystoneauth1.token_endpoint import Token

from accelerators import conductor
from accelerators.models import Event, Intent
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.nova import notices_job
from placement_sync.nova.notices import Notice, interpret_answer
from tests.support.nova import FakeNova, running_nova

pytestmark = pytest.mark.django_db


@pytest.fixture
def nova(settings: Any) -> Iterator[FakeNova]:
    session = Session(Token("http://unused", "token"))
    with running_nova() as one, SERVICE_SESSION.replaced("keystone", lambda: session):
        settings.KEYS = SimpleNamespace(nova_endpoint=one.url)
        yield one


def raise_notices(instance: str, count: int = 1, completed: bool = True) -> list[str]:
    requests = [str(uuid.uuid4()) for _ in range(count)]
    payload = {"instance": instance, "completed": completed, "host": "cmp1"}
    conductor.raise_intents("notice", dict.fromkeys(requests, payload))
    return requests


def make_intents_due() -> None:
    with conductor.writing():
        Intent.objects.update(next_at="2020-01-01T00:00:00Z")


def test_all_requests_of_an_instance_are_notified_in_one_call(nova: FakeNova) -> None:
    instance = str(uuid.uuid4())
    nova.known[instance] = 200
    requests = raise_notices(instance, 3)
    notices_job.step()
    (call,) = nova.calls
    assert {event["tag"] for event in call["events"]} == set(requests)
    assert {(e["name"], e["status"], e["server_uuid"]) for e in call["events"]} == {
        ("accelerator-request-bound", "completed", instance)
    }
    assert nova.versions == ["compute 2.82"]
    assert not Intent.objects.exists()
    assert {(e.action, e.reason) for e in Event.objects.all()} == {
        ("request.notified", "Nova was told completed: 200 accepted")
    }


@pytest.mark.parametrize("code", [422, 404])
def test_a_notice_is_done_when_nova_answers_422_or_404(nova: FakeNova, code: int) -> None:
    instance = str(uuid.uuid4())
    nova.known[instance] = code
    raise_notices(instance, completed=False)
    notices_job.step()
    assert not Intent.objects.exists()
    assert f": {code}" in Event.objects.get().reason


def test_a_refused_notice_is_retried_and_recorded_once(nova: FakeNova) -> None:
    raise_notices(str(uuid.uuid4()))
    nova.status = 400
    for _ in range(3):
        notices_job.step()
        make_intents_due()
    assert Intent.objects.get().attempts == 3
    assert Event.objects.get().action == "request.notice_refused"


@pytest.mark.parametrize("trouble", ["status", "rubbish", "nobody"])
def test_notices_wait_while_nova_is_away_or_answers_rubbish(nova: FakeNova, settings: Any, trouble: str) -> None:
    instances = [str(uuid.uuid4()) for _ in range(3)]
    requests = [raise_notices(instance)[0] for instance in instances]
    nova.known = dict.fromkeys(instances, 200)
    url = nova.url
    if trouble == "nobody":
        settings.KEYS.nova_endpoint = "http://127.0.0.1:1"
    setattr(nova, trouble, 503 if trouble == "status" else True)
    assert not notices_job.step()
    assert Intent.objects.count() == 3
    assert not Event.objects.exists()
    nova.status, nova.rubbish, settings.KEYS.nova_endpoint = 0, False, url
    make_intents_due()
    notices_job.step()
    assert not Intent.objects.exists()
    assert nova.received_statuses().keys() == set(requests)


def test_notices_are_dropped_when_nova_is_switched_off(nova: FakeNova, settings: Any) -> None:
    raise_notices(str(uuid.uuid4()))
    settings.KEYS.nova_endpoint = "off"
    notices_job.step()
    assert not Intent.objects.exists()
    assert not nova.calls


def test_each_entry_of_a_207_answer_is_judged_by_its_own_code() -> None:
    notices = [Notice(name, "vm", True) for name in "abcd"]
    events = [{"tag": "a", "code": 200}, {"tag": "b", "code": 422}, {"tag": "c", "code": 400}]
    answers = interpret_answer(notices, 207, {"events": events})
    assert [(one.is_final, one.needs_attention) for one in answers] == [
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ]


def test_notices_that_a_batch_has_no_time_to_send_are_sent_by_the_next_one(
    nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, request = str(uuid.uuid4()), str(uuid.uuid4())
    nova.known[instance] = 200
    conductor.raise_intents("notice", {request: {"instance": instance, "completed": True, "host": "cmp1"}})
    monkeypatch.setattr(notices_job, "SEND_DEADLINE_S", -1.0)
    assert notices_job.step() and not nova.calls
    monkeypatch.setattr(notices_job, "SEND_DEADLINE_S", 20.0)
    notices_job.step()
    assert list(nova.received_statuses()) == [request]
