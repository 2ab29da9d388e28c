"""Test which reports of a host a batch of the merge reads, and that no host waits for the reports of another one."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from accelerators.commands import command_queue
from accelerators.domain.caller import Caller
from accelerators.domain.diff import HostReport, combine_reports
from accelerators.models import Device, Event, Host
from agents import jobs, spool, wire
from agents.gateway.throttling import TokenBuckets
from agents.jobs import BATCH_BYTES, BATCH_HOSTS, FIRST_SHARE, MergePace
from agents.models import Spooled
from drivers.inventory import Attribute, Backend, DriverReport
from tests.support.reports import get_or_create_host, make_card, make_driver_report, make_report, name_providers

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin each test as a process that has not merged yet."""
    monkeypatch.setattr(jobs, "_batches", itertools.count(1))
    monkeypatch.setattr(jobs, "_pace", MergePace())
    jobs._pace.share = 1.0
    jobs._unfinished_hosts.clear()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the payloads that were decoded, in order."""
    texts: list[str] = []
    decode = spool._decode_report

    def decode_and_note(text: str) -> wire.Report:
        texts.append(text)
        return decode(text)

    monkeypatch.setattr(spool, "_decode_report", decode_and_note)
    return texts


def spool_reports(host: Host, *reports: tuple[DriverReport, ...], first_seq: int = 1, padding: int = 0) -> None:
    """Store the contents of several reports of a host, in this order; each gets `padding` bytes that are ignored."""
    Spooled.objects.bulk_create(
        Spooled(
            host=host, epoch=1, seq=seq, payload=encode_report(seq, *name_providers(host, *drivers)) + " " * padding
        )
        for seq, drivers in enumerate(reports, first_seq)
    )


def encode_report(seq: int, *drivers: DriverReport) -> str:
    return wire.encode_message(wire.Report(1, seq, f"{seq:040x}", drivers))


def test_X5_of_many_reports_of_a_host_only_the_newest_is_read_if_it_answers_everything(decoded: list[str]) -> None:
    host = get_or_create_host()
    spool_reports(host, *[(make_driver_report(make_card(n % 7)),) for n in range(400)])
    assert jobs.merge_batch() and not jobs.merge_batch()
    assert len(decoded) == 1 and not Spooled.objects.exists()
    assert [device.address for device in Device.objects.all()] == ["0000:00:00.0"], "400 % 7 is 1, so the last is 0"
    assert Host.objects.get().applied_seq == 400


def test_the_answer_of_an_older_report_survives_although_its_driver_failed_in_all_later_ones(
    decoded: list[str],
) -> None:
    host = get_or_create_host()
    good = make_driver_report(make_card(1), driver="good")
    failed = make_driver_report(driver="flaky", error="it crashed")
    answered = make_driver_report(make_card(2), driver="flaky")
    spool_reports(host, (good,), (good, answered), *[(good, failed)] * 50)
    assert jobs.merge_batch() and not jobs.merge_batch()
    assert {device.driver for device in Device.objects.all()} == {"good", "flaky"}
    assert Host.objects.get().drivers["flaky"]["error"] == "it crashed"
    assert len(decoded) == 1 + 51, "the newest once more, and not the report before the answer"


def test_X5_a_host_with_many_large_reports_has_one_turn_in_a_batch_and_the_next_batch_takes_others_first() -> None:
    flood, other, third = (get_or_create_host(name) for name in ("flood", "cmp2", "cmp3"))
    failed = make_driver_report(driver="flaky", error="it crashed")
    answered = make_driver_report(make_card(2), driver="flaky")
    spool_reports(flood, (answered,), *[(failed,)] * 7, padding=spool.TURN_BYTES // 2)
    spool_reports(other, (make_driver_report(make_card(3)),))
    jobs.merge_batch()
    assert set(Device.objects.values_list("host__name", flat=True)) == {"flood", "cmp2"}
    assert Spooled.objects.filter(host=flood).count() == 6
    spool_reports(third, (make_driver_report(make_card(3)),))
    jobs.merge_batch()
    assert Spooled.objects.filter(host=flood).count() == 6 and not Spooled.objects.exclude(host=flood).exists()
    for _ in range(3):
        assert jobs.merge_batch()
    assert not Spooled.objects.exists()
    assert Device.objects.get(host=flood).state == "inactive" and Host.objects.get(name="flood").applied_seq == 8


def test_a_batch_takes_the_hosts_that_have_waited_longest_up_to_its_limits() -> None:
    hosts = [get_or_create_host(f"cmp{n}") for n in range(6)]
    content = (make_driver_report(make_card(1)),)
    for host in reversed(hosts):
        spool_reports(host, content, padding=1000)
    spool_reports(hosts[5], *[content] * 20, first_seq=2, padding=1000)

    def take(**limits: int) -> list[int]:
        turns = spool.take_turns(urgent_only=False, **({"max_hosts": 10, "max_bytes": 10**6} | limits))  # type: ignore[arg-type]
        return [hosts.index(next(host for host in hosts if host.id == turn.host_id)) for turn in turns]

    assert take() == [5, 4, 3, 2, 1, 0]
    assert take(max_hosts=2) == [5, 4]
    assert take(max_bytes=1) == [5], "one report is always taken"
    size = len(Spooled.objects.get(host=hosts[4]).payload)
    assert take(max_bytes=size + 10) == [5, 4]


def test_a_failure_lasts_that_a_later_report_only_says_unknown_about() -> None:
    host = get_or_create_host()
    spool_reports(
        host,
        *[
            (make_driver_report(replace(make_card(1), status=status)),)
            for status in ("ok", "failed", "unknown", "unknown")
        ],
    )
    jobs.merge_batch()
    assert Device.objects.get().status == "failed"


def test_a_report_of_another_release_is_dropped_with_one_event_and_the_others_of_its_host_are_merged() -> None:
    host = get_or_create_host()
    spool_reports(host, (make_driver_report(make_card(1)),))
    Spooled.objects.bulk_create(
        Spooled(host=host, epoch=1, seq=seq, payload='{"type":"Report"}') for seq in range(2, 30)
    )
    assert jobs.merge_batch() and not jobs.merge_batch()
    assert Device.objects.count() == 1 and not Spooled.objects.exists()
    assert Event.objects.filter(action="report.refused").count() == 1


@pytest.mark.parametrize("hosts", [2, 12])
def test_the_number_of_statements_of_a_batch_does_not_depend_on_hosts_and_reports(
    hosts: int,
) -> None:
    failed, found = make_driver_report(driver="flaky", error="it crashed"), make_driver_report(make_card(1))
    for number in range(hosts):
        host = get_or_create_host(f"cmp{number}")
        spool_reports(host, *[(found, failed) if number % 2 else (found,)] * hosts)
    with CaptureQueriesContext(connection) as captured:
        assert jobs.merge_batch()
    assert Device.objects.count() == hosts and not Spooled.objects.exists()
    sent = [str(one["sql"]) for one in captured]
    assert len([text for text in sent if "spool" in text]) == 4, "three read, one deletes"


@pytest.fixture
def slow_cards() -> Iterator[None]:
    """Make the database need 20 s to store a card of the vendor `slow`."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN PERFORM pg_sleep(20); RETURN NEW; END'"
        )
        cursor.execute(
            "CREATE TRIGGER be_slow BEFORE INSERT ON accelerators_device FOR EACH ROW WHEN (NEW.vendor = 'slow')"
            " EXECUTE FUNCTION be_slow()"
        )
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP FUNCTION be_slow CASCADE")


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_X5_a_report_that_takes_too_long_alone_is_put_aside_and_the_other_hosts_are_merged(
    slow_cards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BATCH_HOSTS", 4)
    monkeypatch.setattr(jobs, "STATEMENT_TIMEOUT_S", 0.6)
    slow, *others = (get_or_create_host(f"cmp{n}") for n in (1, 2, 3))
    for host in (slow, *others):
        spool_reports(host, (make_driver_report(make_card(1, vendor="slow" if host is slow else "1af4")),))
    jobs.merge()
    assert set(Device.objects.values_list("host__name", flat=True)) == {"cmp2", "cmp3"}
    assert Spooled.objects.get().host == slow, "an acknowledged report is not lost"
    event = Event.objects.get(action="report.delayed")
    assert event.host == "cmp1" and "tried again in 60 s" in event.reason
    monkeypatch.setattr(jobs, "_pace", MergePace())  # The time is over, or the process is another one.
    monkeypatch.setattr(jobs, "STATEMENT_TIMEOUT_S", 60.0)
    with connection.cursor() as cursor:
        cursor.execute("DROP TRIGGER be_slow ON accelerators_device")
    jobs.merge()
    assert Device.objects.count() == 3 and not Spooled.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_X5_of_a_host_that_is_put_aside_only_the_reports_that_matter_stay_in_the_spool(
    slow_cards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BATCH_HOSTS", 1)
    monkeypatch.setattr(jobs, "STATEMENT_TIMEOUT_S", 0.6)
    monkeypatch.setattr(spool, "TURN_BYTES", 4000)
    host = get_or_create_host()
    slow = make_driver_report(make_card(1, vendor="slow"), driver="slow_driver")
    failed = make_driver_report(driver="flaky", error="it crashed")
    answered = make_driver_report(make_card(2), driver="flaky")
    spool_reports(host, *[(slow, answered)] * 8, *[(slow, failed)] * 12)
    jobs.merge()
    assert Event.objects.get(action="report.delayed").host == "cmp1"
    assert list(Spooled.objects.order_by("seq").values_list("seq", flat=True)) == [8, 20]
    monkeypatch.setattr(jobs, "_pace", MergePace())  # The time is over.
    with connection.cursor() as cursor:
        cursor.execute("DROP TRIGGER be_slow ON accelerators_device")
    jobs.merge()
    assert {device.driver for device in Device.objects.all()} == {"slow_driver", "flaky"}, "no answer is lost"
    assert Host.objects.get().drivers["flaky"]["error"] == "it crashed" and Host.objects.get().applied_seq == 20


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_X5_a_report_whose_many_statements_together_take_too_long_is_put_aside(
    slow_cards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BATCH_HOSTS", 4)
    monkeypatch.setattr(jobs, "BATCH_TIMEOUT_S", 1.0)
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE OR REPLACE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN PERFORM pg_sleep(0.4); RETURN NEW; END'"
        )
        for table, column in (("deployable", "driver_name"), ("attribute", "value")):
            cursor.execute(
                f"CREATE TRIGGER be_slow BEFORE INSERT ON accelerators_{table} FOR EACH ROW"
                f" WHEN (NEW.{column} = 'slow') EXECUTE FUNCTION be_slow()"
            )
    slow_part = replace(
        make_card(1).deployables[0], driver_name="slow", attributes=(Attribute("a", "slow"), Attribute("b", "slow"))
    )
    slow, *others = (get_or_create_host(f"cmp{n}") for n in (1, 2, 3))
    spool_reports(slow, (make_driver_report(make_card(1, vendor="slow", deployables=(slow_part,))),))
    for host in others:
        spool_reports(host, (make_driver_report(make_card(1)),))
    began = time.monotonic()
    jobs.merge()
    assert time.monotonic() - began < 10, "no attempt took much longer than its second"
    assert set(Device.objects.values_list("host__name", flat=True)) == {"cmp2", "cmp3"}
    assert Spooled.objects.get().host == slow
    assert Event.objects.get(action="report.delayed").host == "cmp1"
    monkeypatch.setattr(jobs, "_pace", MergePace())
    monkeypatch.setattr(jobs, "BATCH_TIMEOUT_S", 20.0)
    jobs.merge()
    assert Device.objects.count() == 3, "each of its statements is quick enough"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "locked_rows",
    [
        "accelerators_host WHERE name = 'cmp1'",
        "accelerators_device WHERE vendor = 'cmp1'",
        "accelerators_deployable WHERE name LIKE 'cmp1%'",
        "accelerators_attribute WHERE deployable_id = (SELECT id FROM accelerators_deployable)",
        "accelerators_attachhandle WHERE deployable_id = (SELECT id FROM accelerators_deployable)",
    ],
)
def test_a_locked_row_of_one_host_does_not_stop_the_merge_of_the_others(
    locked_rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "STATEMENT_TIMEOUT_S", 0.6)
    monkeypatch.setattr("accelerators.runtime.jobs.TIME_SLICE_S", 3.0)
    locked, other = get_or_create_host("cmp1"), get_or_create_host("cmp2")
    spool_reports(locked, (make_driver_report(make_card(1, vendor="cmp1")),))
    jobs.merge()
    (part,) = (later := make_card(1, vendor="cmp1", model="later")).deployables
    changed = replace(
        part,
        num_accelerators=2,
        attributes=(replace(part.attributes[0], value="PGPU"),),
        handles=(replace(part.handles[0], in_use="guest"),),
    )
    spool_reports(locked, (make_driver_report(replace(later, deployables=(changed,))),), first_seq=2)
    spool_reports(other, (make_driver_report(make_card(1)),))
    with psycopg.connect(**connection.get_connection_params()) as outside:
        assert outside.execute(f"SELECT FROM {locked_rows} FOR UPDATE").rowcount > 0
        jobs.merge()
        assert Spooled.objects.get().host == locked
        assert Device.objects.filter(host=other).exists()
    assert jobs._pace.list_delayed_hosts() == {locked.id}
    monkeypatch.setattr(jobs, "_pace", MergePace())  # The time is over.
    jobs.merge()
    assert Device.objects.filter(host=locked, model="later").exists()
    assert not Spooled.objects.exists() and not Event.objects.filter(action__startswith="report.").exists()


def make_turn(host_id: int, devices: int) -> spool.Turn:
    """Return a turn with one report of a host with this number of devices."""
    return spool.Turn(host_id, [make_report(make_driver_report(*map(make_card, range(devices))))], (1, 1))


def merge_for_minutes(monkeypatch: pytest.MonkeyPatch, devices: int, interval_s: float, minutes: int = 30) -> int:
    """Let one host report this number of devices at this interval, beside a small one, on a database that needs 4 s for
    each batch; return how many of its reports are merged within these minutes."""
    now, merged = 1000.0, 0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = MergePace()
    pace._row_budgets = TokenBuckets(jobs.HOST_ROWS_PER_S, jobs.HOST_BURST_ROWS, lambda: now)
    busy, other = make_turn(1, devices), make_turn(2, 8)
    while now < 1000.0 + minutes * 60:
        throttled = pace.list_throttled_hosts()
        assert 2 not in throttled
        pace.note_merged([other] if 1 in throttled else [busy, other], 4.0)
        merged += 1 not in throttled
        now += interval_s
    return merged


@pytest.mark.parametrize(("devices", "interval_s"), [(4096, 60.0), (100, 1.0), (8, 0.1)])
def test_X5_a_host_within_its_share_of_merged_rows_is_not_throttled_however_slow_the_database_is(
    devices: int, interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert merge_for_minutes(monkeypatch, devices, interval_s) >= 30 * 60 / interval_s - 1


def test_X5_a_host_that_reports_many_devices_without_pause_is_throttled_and_the_one_beside_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows_per_report = 3 * 1300
    merged = merge_for_minutes(monkeypatch, 1300, 0.25)
    lasting = 30 * 60 * jobs.HOST_ROWS_PER_S / rows_per_report
    assert lasting * 0.9 < merged < lasting + jobs.HOST_BURST_ROWS / rows_per_report + 3


def test_one_event_in_ten_minutes_names_a_throttled_host() -> None:
    pace = MergePace()
    for _ in range(4):
        pace.note_merged([make_turn(1, 5000)], 1.0)
    assert pace.list_throttled_hosts() == {1}
    assert list(pace.take_hosts_to_tell_of()) == [1]
    assert not pace.take_hosts_to_tell_of()


@pytest.mark.django_db(transaction=True)
def test_X5_an_event_names_a_throttled_host_and_its_report_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "_pace", MergePace())
    jobs._pace._row_budgets = TokenBuckets(1e-6, 0.0)
    busy, other = get_or_create_host("cmp1"), get_or_create_host("cmp2")
    for seq in (1, 2, 3):
        spool_reports(busy, (make_driver_report(make_card(1, model=f"m{seq}")),), first_seq=seq)
        jobs.merge()
    spool_reports(other, (make_driver_report(make_card(1)),))
    jobs.merge()
    assert Device.objects.get(host=busy).model == "m2" and Device.objects.filter(host=other).exists()
    assert Spooled.objects.get().host == busy, "an acknowledged report is not lost"
    event = Event.objects.get(action="report.delayed")
    assert event.host == "cmp1" and "are throttled" in event.reason
    monkeypatch.setattr(jobs, "_pace", MergePace())  # The time is over.
    jobs.merge()
    assert Device.objects.get(host=busy).model == "m3"


@pytest.mark.django_db(transaction=True)
def test_an_urgent_report_of_a_throttled_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    host, other = get_or_create_host("cmp1"), get_or_create_host("cmp2")
    jobs._pace._throttled[host.id] = time.monotonic() + 300.0
    for seq in (1, 2):  # The second one comes in a batch that ignores urgency.
        monkeypatch.setattr(jobs, "_batches", itertools.count(seq * jobs.OLDEST_FIRST_EVERY - 1))
        spool_reports(host, (make_driver_report(make_card(1, model=f"m{seq}")),), first_seq=seq)
        jobs.merge_batch()
        assert Spooled.objects.filter(host=host).exists(), "it waits"
        Spooled.objects.update(urgent=True)
        assert jobs.merge_batch()
        assert Device.objects.get(host=host).model == f"m{seq}"
    assert not Spooled.objects.exists() and not Device.objects.filter(host=other).exists()


@pytest.mark.django_db(transaction=True)
def test_X5_the_spool_of_a_throttled_host_is_folded_before_it_is_full(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.KEYS = dataclasses.replace(settings.KEYS, host_reports_per_s=1 / 3)  # 40 reports may wait
    host = get_or_create_host("cmp1")
    jobs._pace._throttled[host.id] = time.monotonic() + 300.0
    spool_reports(host, *[(make_driver_report(make_card(n % 7)),) for n in range(10)])
    jobs.merge()
    assert Spooled.objects.count() == 10, "a quarter may wait"
    jobs._pace._folded_at = float("-inf")
    spool_reports(host, (make_driver_report(make_card(1)),), first_seq=11)
    jobs.merge()
    assert Spooled.objects.get().seq == 11


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("problem", ["slow", "locked"])
def test_folding_that_takes_too_long_delays_no_other_host(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "FOLD_TIMEOUT_S", 0.3)
    host, other = get_or_create_host("cmp1"), get_or_create_host("cmp2")
    spool_reports(host, *[(make_driver_report(make_card(1)),)] * 2)

    def be_slow(host_id: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(5)" if problem == "slow" else "SET LOCAL lock_timeout = 1")
            cursor.execute("LOCK TABLE accelerators_attribute IN SHARE MODE")

    monkeypatch.setattr(spool, "fold_reports", be_slow)
    with psycopg.connect(**connection.get_connection_params()) as outside:
        outside.execute("LOCK TABLE accelerators_attribute IN ROW EXCLUSIVE MODE")
        with transaction.atomic():
            jobs._record_delay(host.id, 60.0)
            jobs._fold_reports([host.id, other.id])
    assert Event.objects.get(action="report.delayed").host == "cmp1"
    assert Spooled.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_a_throttled_host_does_not_wait_while_it_has_an_open_command() -> None:
    host = get_or_create_host("cmp1")
    spool_reports(host, (make_driver_report(make_card(1, acts="health")),))
    jobs.merge()
    jobs._pace._throttled[host.id] = time.monotonic() + 300.0
    spool_reports(host, (make_driver_report(make_card(1, model="m2")),), first_seq=2)
    jobs.merge()
    assert Spooled.objects.exists(), "it waits"
    olga = Caller("olga", "u", frozenset({"admin"}), "p1")
    command_queue.order_device_command("health", Device.objects.get().uuid, olga)
    jobs.merge()
    assert not Spooled.objects.exists() and Device.objects.get().model == "m2"


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_a_table_that_is_locked_during_one_batch_postpones_no_single_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "STATEMENT_TIMEOUT_S", 0.6)
    monkeypatch.setattr("accelerators.runtime.jobs.TIME_SLICE_S", 0.1)
    for host in (get_or_create_host("cmp1"), get_or_create_host("cmp2")):
        spool_reports(host, (make_driver_report(make_card(1)),))
    with psycopg.connect(**connection.get_connection_params()) as outside:
        outside.execute("LOCK TABLE accelerators_attribute IN SHARE MODE")
        jobs.merge()
        assert Spooled.objects.count() == 2 and jobs._pace.list_delayed_hosts() == set()
    monkeypatch.setattr("accelerators.runtime.jobs.TIME_SLICE_S", 5.0)
    jobs.merge()
    assert Device.objects.count() == 2 and not Spooled.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_hosts_that_all_have_locked_rows_are_left_out_and_do_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "STATEMENT_TIMEOUT_S", 0.6)
    monkeypatch.setattr(jobs, "BATCH_HOSTS", 3)
    monkeypatch.setattr("accelerators.runtime.jobs.TIME_SLICE_S", 4.0)
    *locked, other = (get_or_create_host(f"cmp{n}") for n in range(4))
    for host in locked:
        spool_reports(host, (make_driver_report(make_card(1)),))
    jobs.merge()
    later = make_card(1, model="later")
    changed = replace(later.deployables[0], num_accelerators=2)
    for host in (*locked, other):
        spool_reports(host, (make_driver_report(replace(later, deployables=(changed,))),), first_seq=2)
    with psycopg.connect(**connection.get_connection_params()) as outside:
        assert outside.execute("SELECT FROM accelerators_deployable FOR UPDATE").rowcount == 3
        jobs.merge()
        assert Device.objects.filter(host=other).exists() and Spooled.objects.count() == 3
    jobs._pace._delays.clear()  # The time is over.
    jobs.merge()
    assert Device.objects.filter(model="later").count() == 4


def test_a_host_is_left_out_longer_each_time_that_its_row_is_locked() -> None:
    pace, before = MergePace(), time.monotonic()
    for _ in range(5):
        pace.note_locked([1])
    until, delay_s = pace._delays[1]
    assert delay_s == 60.0 and before + 60.0 <= until <= time.monotonic() + 60.0


def test_batches_become_smaller_after_slow_ones_and_larger_after_quick_ones() -> None:
    turn = [spool.Turn(1, [HostReport(1, 1, "", ())], (1, 1))]
    pace = MergePace()
    assert pace.share == FIRST_SHARE, "the process before may have been killed"
    for _ in range(10):
        pace.note_merged(turn, 0.1)
    assert (pace.max_hosts, pace.max_bytes) == (BATCH_HOSTS, BATCH_BYTES)
    pace.note_merged(turn, 2.0)
    assert pace.max_hosts == BATCH_HOSTS
    pace.note_merged(turn, 5.0)
    assert pace.max_hosts == BATCH_HOSTS // 2
    several = [spool.Turn(1, [*turn[0].reports] * 2, (1, 1))]
    assert pace.note_timeout(several) == 0.0 and pace.max_hosts == BATCH_HOSTS // 16
    assert pace.note_timeout(turn * 2) == pace.note_timeout(turn * 2) == 0.0 and pace.max_hosts == 1
    assert pace.note_timeout(several) == 60.0, "the batch cannot become smaller"
    assert [pace.note_timeout(turn) for _ in range(8)] == [60.0 * 2**n for n in range(1, 6)] + [3600.0] * 3
    assert pace.max_hosts == 1 and pace.list_delayed_hosts() == {1}
    pace.note_merged(turn, 0.1)
    assert pace.list_delayed_hosts() == set()


cards = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["ok", "failed", "unknown"]), st.sampled_from(["", "b1", "b2"])),
    max_size=4,
    unique_by=lambda card: card[0],
)
answers = st.tuples(cards, st.sets(st.sampled_from(["b1", "b2"])))
contents = st.dictionaries(st.sampled_from(["one", "two"]), st.one_of(st.none(), answers))


@given(st.lists(contents, min_size=1, max_size=6))
def test_leaving_out_older_reports_does_not_change_what_is_merged(history: list[dict[str, Any]]) -> None:
    reports = []
    for seq, content in enumerate(history, 1):
        drivers = [build_driver_report(name, answer) for name, answer in content.items()]
        reports.append(HostReport(1, seq, f"{seq:040x}", tuple(drivers)))
    rows = [spool.SpooledReport(1, 1, one.seq, encode_report(one.seq, *one.drivers)) for one in reports]
    assert combine_reports(spool.build_turn(rows).reports, (0, 0)) == combine_reports(reports, (0, 0))


def build_driver_report(name: str, answer: Any) -> DriverReport:
    """Build the report of a driver from (cards, failed backends), or with an error if there is no answer."""
    if answer is None:
        return DriverReport(name, "it failed")
    said, failed_backends = answer
    devices = [
        replace(make_card(n), status=status, backend=backend)
        for n, status, backend in said
        if backend not in failed_backends
    ]
    backends = [Backend(one, "pci", error="x" if one in failed_backends else "") for one in ("b1", "b2")]
    return make_driver_report(*devices, driver=name, backends=tuple(backends))
