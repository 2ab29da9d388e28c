"""Tests of the order in which the gateway's writer processes jobs. The tests process its batches one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, connection
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.models import Event, Host
from accelerators.runtime import jobs, pubsub
from agents import authentication, credentials, key_revocation
from agents.authentication import ConnectionRejectedError
from agents.gateway.asgi_app import AgentGateway
from agents.gateway.sessions import SessionClosedError
from agents.gateway.writer import (
    SELECT_HOSTS_WITHOUT_APPLIED_REPORT,
    AdmitJob,
    SpoolAccount,
    SpoolJob,
    TrustJob,
    WriterJob,
)
from agents.key_revocation import ConnectionIdentity
from agents.models import Agent, Spooled
from cyborgweb.settings.keys import Keys
from tests.support.reports import get_or_create_host
from tests.support.wireagent import WireAgent

pytestmark = pytest.mark.django_db
R0, R1 = "0" * 40, "1" * 40


@dataclass
class WriterByHand:
    """The writer of a gateway without its thread, and an event loop that runs only after each batch."""

    gateway: AgentGateway
    loop: asyncio.AbstractEventLoop

    def enqueue(self, job: WriterJob) -> asyncio.Future[Any]:
        """Put a job into the writer's queue, as the event loop does; return its future."""
        self.gateway._writer.put(job)
        return job.future

    def enqueue_report(self, host: Host, seq: int, content: str, *, is_faulty: bool = False) -> asyncio.Future[Any]:
        """Put a report into the writer's queue, with a faulty device if wanted; return its future."""
        faulty = (("key", "failed"),) if is_faulty else ()
        return self.enqueue(SpoolJob(self.loop.create_future(), host.id, (1, seq), content, "{}", faulty))

    def admit_and_get_applied_hash(self, agent: WireAgent) -> str:
        """Admit the agent in the next batch; return the hash that its Welcome would name as applied."""
        credential = credentials.parse_authorization(agent.credential("nonce"))
        future = self.enqueue(AdmitJob(self.loop.create_future(), credential, None))
        self.process_batch()
        return str(future.result().applied_hash)

    def process_batch(self) -> None:
        """Process the next batch of the queue, then run the event loop once so that the futures have their results."""
        self.gateway._writer._process_next_batch()
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()


@pytest.fixture
def writer() -> Iterator[WriterByHand]:
    loop = asyncio.new_event_loop()
    made = WriterByHand(AgentGateway(Keys(flush_max_rows=1, flush_interval_ms=0.0)), loop)
    made.gateway._writer._loop = made.gateway._report_writer._loop = loop
    yield made
    loop.close()


@pytest.fixture
def agent() -> WireAgent:
    made = WireAgent(0)
    host = get_or_create_host("cmp1")
    with conductor.writing():
        Host.objects.filter(pk=host.pk).update(applied_hash=R0)
    Agent.objects.create(host=host, public_key=made.public_key)
    return made


@pytest.mark.parametrize("is_faulty", [False, True])
def test_an_admission_names_no_applied_hash_while_a_report_of_the_host_waits(
    writer: WriterByHand, agent: WireAgent, is_faulty: bool
) -> None:
    host, other = Host.objects.get(), get_or_create_host("cmp2")
    assert writer.admit_and_get_applied_hash(agent) == R0
    writer.enqueue_report(other, 1, R1)
    before = writer.enqueue_report(host, 1, R1)
    assert writer.admit_and_get_applied_hash(agent) == "", "it waits behind the other's"
    after = writer.enqueue_report(host, 2, R0, is_faulty=is_faulty)
    for _ in range(2):
        writer.process_batch()
    assert (before.result(), after.result()) == (True, True), "both are stored, and seq says which is the later"
    assert writer.admit_and_get_applied_hash(agent) == ""
    Spooled.objects.all().delete()
    assert writer.enqueue_report(host, 3, R0) and writer.admit_and_get_applied_hash(agent) == "", "of this batch"
    assert writer.admit_and_get_applied_hash(agent) == R0
    assert not Spooled.objects.exists(), "alone it is what is applied"


def test_an_admission_names_no_applied_hash_if_the_other_thread_stores_a_report_meanwhile(
    writer: WriterByHand, agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is queued before the agent is looked up, and stored before the answer is built."""
    reports, find = writer.gateway._report_writer, authentication.find_enrolled

    def find_then_store(*arguments: Any) -> Any:
        found = find(*arguments)
        reports._process_next_batch()
        return found

    reports.put(SpoolJob(writer.loop.create_future(), Host.objects.get().id, (1, 1), R1, "{}"))
    monkeypatch.setattr(authentication, "find_enrolled", find_then_store)
    assert writer.admit_and_get_applied_hash(agent) == ""
    assert Spooled.objects.count() == 1


@pytest.mark.usefixtures("agent")
def test_a_report_with_the_applied_content_is_stored_if_the_other_thread_stores_one_meanwhile(
    writer: WriterByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other report, which is older, would be merged last."""
    reports, host, forget_use = writer.gateway._report_writer, Host.objects.get(), SpoolAccount.forget_use

    def store_other(account: SpoolAccount, host_ids: Any, queued_before: Any) -> None:
        forget_use(account, host_ids, queued_before)
        monkeypatch.undo()
        reports._process_next_batch()

    reports.put(SpoolJob(writer.loop.create_future(), host.id, (1, 1), R1, "{}"))
    latest = writer.enqueue_report(host, 2, R0)
    monkeypatch.setattr(SpoolAccount, "forget_use", store_other)
    writer.process_batch()
    assert latest.result() is True
    assert sorted(Spooled.objects.values_list("seq", flat=True)) == [1, 2]


def test_a_job_that_is_to_be_woken_again_while_it_is_woken_is_not_forgotten(
    writer: WriterByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, woken = writer.gateway._writer, []

    def wake(names: list[str]) -> None:
        woken.append(names)
        if len(woken) == 1:
            thread.request_wake_ups({"merge"})

    monkeypatch.setattr(jobs, "wake_jobs", wake)
    thread.request_wake_ups({"merge"})
    for _ in range(3):
        thread._wake_jobs()
    assert woken == [["merge"], ["merge"]]


def test_a_job_is_still_to_be_woken_after_a_database_error(
    writer: WriterByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(names: list[str]) -> None:
        raise OperationalError("the database is away")

    monkeypatch.setattr(jobs, "wake_jobs", fail)
    writer.gateway._writer.request_wake_ups({"merge"})
    with pytest.raises(OperationalError):
        writer.gateway._writer._wake_jobs()
    assert writer.gateway._writer._jobs_to_wake == {"merge"}


def test_a_database_error_while_an_agent_is_admitted_is_not_called_an_authentication_failure(
    writer: WriterByHand, agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IntegrityError

    monkeypatch.setattr(authentication, "identify_or_enrol", fail)
    with pytest.raises(ConnectionRejectedError, match="the agent could not be admitted now: IntegrityError"):
        writer.admit_and_get_applied_hash(agent)


def test_a_report_whose_connection_has_ended_is_not_stored(writer: WriterByHand, agent: WireAgent) -> None:
    host, other = Host.objects.get(), get_or_create_host("cmp2")
    writer.enqueue_report(other, 1, R1)
    gone = writer.enqueue_report(host, 1, R1)
    writer.process_batch()
    gone.cancel()
    writer.process_batch()
    assert list(Spooled.objects.values_list("host", flat=True)) == [other.id]
    assert writer.admit_and_get_applied_hash(agent) == R0


@pytest.mark.django_db(transaction=True)
def test_a_report_that_the_database_rejects_ends_only_its_own_connection(writer: WriterByHand) -> None:
    bad, good = get_or_create_host("bad"), get_or_create_host("good")
    writer.gateway._writer._max_rows = 2
    rejected = writer.enqueue(SpoolJob(writer.loop.create_future(), bad.id, (1, 1), R0, "\0"))
    stored = writer.enqueue_report(good, 1, R0)
    writer.process_batch()
    with pytest.raises(SessionClosedError, match="the database cannot store this message") as refused:
        rejected.result()
    assert (refused.value.code, stored.result()) == ("database", True)
    assert list(Spooled.objects.values_list("host", flat=True)) == [good.id]


def test_the_spool_is_measured_from_the_report_that_was_the_oldest_before(writer: WriterByHand) -> None:
    host, thread = get_or_create_host("cmp1"), writer.gateway._writer
    put_aside, waiting = (Spooled.objects.create(host=host, epoch=1, seq=seq, payload="{}") for seq in (1, 2))
    Spooled.objects.filter(pk=put_aside.pk).update(received_at=datetime.now(UTC) - timedelta(minutes=10))
    for first_id in (0, waiting.pk):
        thread._account.has_reports, thread._depth_measured_at = True, float("-inf")
        with CaptureQueriesContext(connection) as statements:
            thread._measure_spool()
        assert f"id >= {first_id} " in statements[0]["sql"]
        assert writer.gateway.report_jitter._oldest_seen
        assert writer.gateway.report_jitter._oldest_seen[1] == waiting.pk


def test_the_search_for_hosts_without_applied_report_can_use_its_index() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN {SELECT_HOSTS_WITHOUT_APPLIED_REPORT}")
        assert "host_without_applied_report" in str(cursor.fetchall())


@pytest.mark.django_db(transaction=True)
def test_a_change_of_trust_is_applied_once_although_the_database_goes_away_in_its_batch(
    writer: WriterByHand, agent: WireAgent
) -> None:
    """While the batch is repeated, a person has undone the first change."""
    host, done = Host.objects.get(), list[str]()
    first, second = (ConnectionIdentity(address, "", 1) for address in ("10.0.0.1", "10.0.0.2"))

    def bar_key() -> None:
        done.append("barred")
        key_revocation.bar_cloned_key(host.id, agent.public_key, first, second)

    def fail_once() -> None:
        done.append("tried")
        if done.count("tried") == 1:
            key_revocation.lift_clone_bar(key_revocation.find_agent("cmp1"), "olga")
            raise OperationalError("the connection is lost")

    writer.gateway._writer._max_rows = 2
    futures = [writer.enqueue(TrustJob(writer.loop.create_future(), change)) for change in (bar_key, fail_once)]
    writer.process_batch()
    assert [future.result() for future in futures] == [None, None]
    assert (done, Agent.objects.get().barred) == (["barred", "tried", "tried"], "")
    assert Event.objects.filter(action="agent.clone").count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_bar_whose_notification_fails_after_its_commit_is_not_repeated(
    writer: WriterByHand, agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first attempt, a person has lifted the bar."""
    host, tries = Host.objects.get(), list[str]()
    first, second = (ConnectionIdentity(address, "", 1) for address in ("10.0.0.1", "10.0.0.2"))

    def fail_after_the_bar_is_lifted(topic: str, _detail: str) -> None:
        monkeypatch.undo()
        key_revocation.lift_clone_bar(key_revocation.find_agent("cmp1"), "olga")
        tries.append(topic)
        raise OperationalError("the connection is lost")

    monkeypatch.setattr(pubsub, "publish", fail_after_the_bar_is_lifted)
    job = TrustJob(
        writer.loop.create_future(), lambda: key_revocation.bar_cloned_key(host.id, agent.public_key, first, second)
    )
    future = writer.enqueue(job)
    writer.process_batch()
    assert (future.result(), tries, Agent.objects.get().barred) == (None, [key_revocation.TOPIC], "")
    assert Event.objects.filter(action="agent.clone").count() == 1


def test_a_second_request_for_a_new_key_changes_nothing(agent: WireAgent) -> None:
    row = key_revocation.find_agent("cmp1")
    assert key_revocation.request_key_rotation(row, "olga")
    asked_at = Agent.objects.get().rotate_asked_at
    assert not key_revocation.request_key_rotation(row, "olga")
    assert Agent.objects.get().rotate_asked_at == asked_at
    assert Event.objects.filter(action="agent.rotation").count() == 1
