"""Test that requests of instances that Nova has deleted are freed, and that all other requests are kept."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from keystoneauth1.session import Session
from keystoneauth1.token_endpoint import Token

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, Deployable, Device, DeviceProfile, Event
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from cyborgweb.monitoring import backlog
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.models import Look, NovaEndpoint, Vanished
from placement_sync.nova import client, deleted_instances, endpoints
from tests.support.nova import FakeNova, running_nova
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
NOVA = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
LONG_AGO = "2020-01-01T00:00:00Z"


@pytest.fixture
def nova(settings: Any) -> Iterator[FakeNova]:
    session = Session(Token("http://unused", "token"))
    with running_nova() as one, SERVICE_SESSION.replaced("keystone", lambda: session):
        settings.KEYS.nova_endpoint, before = one.url, settings.KEYS.nova_endpoint
        yield one
        settings.KEYS.nova_endpoint = before


@pytest.fixture(autouse=True)
def _keys(settings: Any) -> None:
    keys = settings.KEYS
    settings.KEYS = SimpleNamespace(**{name: getattr(keys, name) for name in keys.__dataclass_fields__})


def bind_instances(count: int) -> list[str]:
    """Create `count` instances with one bound request each and return their ids."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=count)))
    lifecycle.enable_device(Device.objects.get().uuid, NOVA)
    with conductor.writing():
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])
    provider = str(Deployable.objects.get().rp_uuid)
    instances = [str(uuid.uuid4()) for _ in range(count)]
    for instance in instances:
        (request,) = binding.create_requests("one", NOVA)
        binding.bind_requests([BindSpec(request, "cmp1", provider, instance)], NOVA)
    with conductor.writing():
        AcceleratorRequest.objects.update(updated_at=LONG_AGO)
    return instances


def run_job_after_a_minute() -> None:
    """Run the job as if a minute had passed since its last run."""
    Look.objects.all().delete()
    deleted_instances.step()


def instances_with_requests() -> set[str]:
    return {str(one) for one in AcceleratorRequest.objects.values_list("instance_uuid", flat=True)}


def run_job_until_quiet() -> None:
    """Run the job four times, with more than a minute between the runs."""
    for _ in range(4):
        Vanished.objects.update(since=LONG_AGO)
        run_job_after_a_minute()


def test_a_request_is_freed_when_nova_names_its_instance_as_deleted_and_answers_404_a_minute_later(
    nova: FakeNova,
) -> None:
    nova.servers = [gone, *alive] = bind_instances(4)
    nova.delete(gone)
    run_job_after_a_minute()
    assert instances_with_requests() == {gone, *alive}
    run_job_after_a_minute()
    assert gone in instances_with_requests(), "the two answers were not far enough apart"
    Vanished.objects.update(since=LONG_AGO)
    run_job_after_a_minute()
    assert instances_with_requests() == set(alive)
    assert gone in Event.objects.get(action="instance.vanished").reason
    assert not Vanished.objects.exists()


@pytest.mark.slow
def test_S1_a_listing_that_names_our_instances_does_not_prove_an_address_whose_look_ups_show_none(
    nova: FakeNova,
) -> None:
    """A service user who may list all projects, but is no administrator, gets running instances in the listing, because
    Nova ignores `deleted`, and 404 for each instance of another project."""
    instances = bind_instances(3)
    nova.servers = [*instances]
    nova.delete(*instances)
    run_job_until_quiet()
    assert instances_with_requests() == set(instances)
    assert backlog.read_backlog().unknown_to_nova == 3
    endpoints.confirm_endpoint(NovaEndpoint.objects.get().uuid, "olga", "they are deleted")
    run_job_until_quiet()
    assert instances_with_requests() == set()


def test_an_instance_that_nova_has_purged_is_found_in_turn(nova: FakeNova) -> None:
    nova.servers = bind_instances(3)
    nova.delete(nova.servers[0])
    nova.deleted.clear()
    alive = [*nova.servers]
    run_job_until_quiet()
    assert instances_with_requests() == set(alive)


@pytest.mark.slow
def test_nova_is_asked_for_deleted_instances_only_and_for_a_bounded_number_of_single_ones(nova: FakeNova) -> None:
    nova.servers = instances = bind_instances(40)
    run_job_after_a_minute()
    assert len(nova.asked) == deleted_instances.MAX_LOOKUPS
    run_job_after_a_minute()
    assert len(nova.asked) == 2 * deleted_instances.MAX_LOOKUPS
    assert set(nova.asked) == set(instances), "the second run continues where the first ended"
    assert {query["deleted"] for query in nova.listings} == {"true"}
    assert all("changes-since" in query for query in nova.listings)


@pytest.mark.slow
def test_many_suspects_leave_places_for_the_turn_of_the_others(nova: FakeNova) -> None:
    instances = bind_instances(40)
    nova.servers = [*instances]
    run_job_after_a_minute()
    suspects = instances[:38]
    nova.delete(*suspects)
    run_job_after_a_minute()
    Vanished.objects.update(since=LONG_AGO)
    nova.asked.clear()
    run_job_after_a_minute()
    assert set(nova.asked) >= set(instances[38:])
    assert len(nova.asked) <= deleted_instances.MAX_LOOKUPS


def test_the_next_listing_begins_shortly_before_the_answer_to_the_last_one(nova: FakeNova) -> None:
    nova.servers = bind_instances(1)
    run_job_after_a_minute()
    run_job_after_a_minute()
    (first, second) = (datetime.fromisoformat(query["changes-since"]) for query in nova.listings)
    assert timedelta(minutes=50) < second - first < timedelta(minutes=60)
    assert timedelta(minutes=4) < datetime.now(UTC) - second < timedelta(minutes=7)


@pytest.mark.slow
def test_a_listing_that_is_cut_off_continues_at_its_page(nova: FakeNova, monkeypatch: pytest.MonkeyPatch) -> None:
    nova.servers, nova.page = bind_instances(5), 1
    nova.delete(*nova.servers)
    monkeypatch.setattr(deleted_instances, "LISTING_DEADLINE_S", 0.3)
    monkeypatch.setattr(deleted_instances, "MAX_LOOKUPS", 0)
    nova.read_slow_s = 0.2
    seen = 0
    for _ in range(8):
        run_job_after_a_minute()
        assert Vanished.objects.count() >= seen, "what one run has read is kept"
        seen = Vanished.objects.count()
    assert seen == 5
    markers = [query.get("marker", "") for query in nova.listings]
    assert markers[1] and markers[1] != markers[0], "the second run does not begin at the first page"


def test_a_page_that_comes_in_small_parts_ends_the_run_at_the_deadline(
    nova: FakeNova, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The time-out of a request does not end it: each part comes in time."""
    bind_instances(1)
    monkeypatch.setattr(deleted_instances, "LISTING_DEADLINE_S", 0.2)
    monkeypatch.setattr(client, "list_deleted_instances", lambda *_: time.sleep(3.0))
    started = time.monotonic()
    run_job_after_a_minute()
    assert time.monotonic() - started < 2.5
    assert "could not be compared with Nova: Nova did not answer in time" in caplog.text


def test_a_listing_whose_page_nova_does_not_know_any_more_begins_again(nova: FakeNova) -> None:
    nova.servers = [gone, *alive] = bind_instances(2)
    row = NovaEndpoint.objects.create(url=nova.url, changes_since="2026-01-01T00:00:00Z", page_marker=str(uuid.uuid4()))
    nova.delete(gone)
    run_job_after_a_minute()
    row.refresh_from_db()
    assert row.page_marker == ""
    run_job_until_quiet()
    assert instances_with_requests() == set(alive)


def test_an_instance_in_a_cell_that_is_down_is_kept_and_does_not_hold_up_the_others(
    nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    nova.servers = [down, gone, *alive] = bind_instances(4)
    monkeypatch.setattr(deleted_instances, "MAX_SUSPECT_LOOKUPS", 1)
    run_job_after_a_minute()
    nova.delete(down, gone)
    nova.broken = {down}
    run_job_after_a_minute()
    Vanished.objects.filter(instance=gone).update(since="2020-01-02T00:00:00Z")
    Vanished.objects.filter(instance=down).update(since=LONG_AGO)
    for _ in range(2):
        run_job_after_a_minute()
    assert instances_with_requests() == {down, *alive}


def test_nova_is_asked_outside_of_every_transaction_of_the_job(nova: FakeNova, monkeypatch: pytest.MonkeyPatch) -> None:
    nova.servers = bind_instances(2)
    nova.delete(nova.servers[0])
    depth, found = len(connection.savepoint_ids), set()

    def note_depth(ask: Any, *arguments: Any) -> Any:
        found.add(len(connection.savepoint_ids))
        return ask(*arguments)

    for name in ("get_servers", "call_with_deadline"):
        monkeypatch.setattr(client, name, partial(note_depth, getattr(client, name)))
    run_job_until_quiet()
    assert (found, len(instances_with_requests())) == ({depth}, 1)


def test_S1_a_request_that_changed_while_nova_was_asked_is_kept(
    nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    nova.servers = [gone, *alive] = bind_instances(2)
    nova.delete(gone)
    run_job_after_a_minute()
    Vanished.objects.update(since=LONG_AGO)
    ask = client.get_servers

    def ask_while_the_request_changes(*arguments: Any) -> Any:
        answers = ask(*arguments)
        with conductor.writing():
            AcceleratorRequest.objects.filter(instance_uuid=gone).update(updated_at=datetime.now(UTC))
        return answers

    monkeypatch.setattr(client, "get_servers", ask_while_the_request_changes)
    run_job_after_a_minute()
    assert instances_with_requests() == {gone, *alive}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 10))])
@pytest.mark.slow
def test_S1_whatever_happens_exactly_the_deleted_instances_are_freed_at_a_proven_address(
    nova: FakeNova, seed: int
) -> None:
    """Instances are deleted and purged, and Nova is away, breaks and forgets pages, in a random order."""
    chance = random.Random(seed)
    nova.servers = bind_instances(12)
    instances, proven = set(nova.servers), False
    for _ in range(15):
        match chance.choice(["delete", "purge", "away", "break", "back", "wait"]):
            case "delete" if nova.servers:
                nova.delete(chance.choice(nova.servers))
            case "purge" if nova.deleted:
                del nova.deleted[chance.choice([*nova.deleted])]
            case "away":
                nova.status = chance.choice([404, 503])
            case "break":
                nova.broken = {chance.choice([*instances])}
            case "back":
                nova.status, nova.broken = 0, set()
            case _:
                Vanished.objects.update(since=LONG_AGO)
        run_job_after_a_minute()
        proven = proven or bool(NovaEndpoint.objects.exclude(proven_at=None).count())
        assert instances_with_requests() >= set(nova.servers), "a running instance lost its device"
        assert proven or instances_with_requests() == instances
    nova.status, nova.broken = 0, set()
    run_job_until_quiet()
    if proven or nova.servers:
        assert instances_with_requests() == set(nova.servers)


def test_an_instance_whose_request_changed_within_a_minute_is_not_compared(nova: FakeNova) -> None:
    fresh, *alive = bind_instances(3)
    with conductor.writing():
        AcceleratorRequest.objects.filter(instance_uuid=fresh).update(updated_at=datetime.now(UTC))
    nova.servers = alive
    run_job_after_a_minute()
    assert not Vanished.objects.exists()


def test_an_instance_that_nova_shows_again_is_no_longer_suspected(nova: FakeNova) -> None:
    instances = bind_instances(3)
    nova.servers = instances[1:]
    run_job_after_a_minute()
    assert Vanished.objects.exists()
    Vanished.objects.update(since=LONG_AGO)
    nova.servers = instances
    run_job_after_a_minute()
    assert not Vanished.objects.exists()
    nova.servers = instances[1:]
    run_job_after_a_minute()
    assert instances_with_requests() == set(instances)


@pytest.mark.parametrize("trouble", [503, 403, 404])
def test_a_failed_listing_frees_no_request(nova: FakeNova, trouble: int) -> None:
    instances = bind_instances(2)
    nova.status = trouble
    for _ in range(2):
        run_job_after_a_minute()
        Vanished.objects.update(since=LONG_AGO)
    assert instances_with_requests() == set(instances)
    assert not Vanished.objects.exists()


def test_an_address_whose_listing_fails_is_proven_by_the_look_ups_which_free_nothing(
    nova: FakeNova, caplog: pytest.LogCaptureFixture
) -> None:
    """The service user may not list the instances of all projects."""
    nova.servers = bind_instances(5)
    instances, nova.servers = set(nova.servers), nova.servers[:1]
    nova.listing_status = 403
    run_job_until_quiet()
    assert NovaEndpoint.objects.get().proven_at
    assert instances_with_requests() == instances
    assert "could not be compared with Nova: GET /servers: 403" in caplog.text


def test_an_answer_that_is_no_listing_frees_no_request_and_warns(
    nova: FakeNova, caplog: pytest.LogCaptureFixture
) -> None:
    instances = bind_instances(2)
    nova.rubbish = True
    for _ in range(2):
        run_job_after_a_minute()
        Vanished.objects.update(since=LONG_AGO)
    assert instances_with_requests() == set(instances)
    assert "the answer is not a list of servers" in caplog.text


@pytest.mark.parametrize("count", [1, 3, 4])
def test_S1_a_nova_of_another_region_frees_nothing_even_of_one_instance(
    nova: FakeNova, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    instances = bind_instances(count)
    nova.servers = [str(uuid.uuid4())]
    for _ in range(3):
        run_job_after_a_minute()
        Vanished.objects.update(since=LONG_AGO)
    assert instances_with_requests() == set(instances)
    assert "it has never shown an instance that holds an accelerator here" in caplog.text


def test_instances_that_nova_has_never_shown_are_freed_once_a_person_confirms_its_address(nova: FakeNova) -> None:
    bind_instances(3)
    run_job_until_quiet()
    endpoint = NovaEndpoint.objects.get()
    assert endpoint.unknown_instances == 3
    endpoints.confirm_endpoint(endpoint.uuid, "olga", "all were deleted before the upgrade")
    run_job_until_quiet()
    assert instances_with_requests() == set()
    assert NovaEndpoint.objects.get().unknown_instances == 0


@pytest.mark.slow
def test_the_number_of_unknown_instances_counts_those_of_all_turns_not_only_of_the_last(
    nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleted_instances, "MAX_LOOKUPS", 3)
    instances = bind_instances(8)
    counts = []
    for _ in range(4):
        run_job_after_a_minute()
        counts.append(backlog.read_backlog().unknown_to_nova)
    assert counts == [3, 6, 8, 8]
    nova.status = 503
    binding.delete_requests_of_instance(instances[0], NOVA)
    run_job_after_a_minute()
    assert backlog.read_backlog().unknown_to_nova == 7, "one of them holds nothing any more"


def test_an_address_is_proven_although_the_instances_of_its_first_turns_are_deleted(
    nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleted_instances, "MAX_LOOKUPS", 3)
    nova.servers = [max(bind_instances(8))]
    for _ in range(3):
        run_job_after_a_minute()
    assert NovaEndpoint.objects.get().proven_at
    assert backlog.read_backlog().unknown_to_nova == 0


def test_a_confirmation_that_is_withdrawn_during_a_run_frees_no_more_requests(
    nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind_instances(2)
    run_job_after_a_minute()
    row, refuse = NovaEndpoint.objects.get(), endpoints.refuse_unless_trusted
    endpoints.confirm_endpoint(row.uuid, "olga")

    def withdraw_after_the_check(url: str) -> None:
        refuse(url)
        endpoints.withdraw_confirmation(row.uuid, "olga")

    monkeypatch.setattr(endpoints, "refuse_unless_trusted", withdraw_after_the_check)
    run_job_until_quiet()
    assert len(instances_with_requests()) == 2
    assert backlog.read_backlog().unknown_to_nova == 2


def test_an_address_that_is_not_used_any_more_is_no_alert(nova: FakeNova, settings: Any) -> None:
    instances = bind_instances(2)
    run_job_after_a_minute()
    assert backlog.read_backlog().unknown_to_nova == 2
    with running_nova() as other:
        settings.KEYS.nova_endpoint, other.servers = other.url, instances
        run_job_after_a_minute()
    assert backlog.read_backlog().unknown_to_nova == 0


@pytest.mark.slow
def test_all_instances_that_are_deleted_at_once_are_freed_at_an_address_that_has_shown_one(nova: FakeNova) -> None:
    nova.servers = bind_instances(5)
    run_job_after_a_minute()
    assert NovaEndpoint.objects.get().proven_at
    nova.delete(*nova.servers)
    run_job_until_quiet()
    assert instances_with_requests() == set()


@pytest.mark.slow
def test_up_to_three_instances_that_nova_has_purged_are_freed_although_it_shows_no_other_one(nova: FakeNova) -> None:
    nova.servers = bind_instances(5)
    run_job_after_a_minute()
    nova.delete(*nova.servers)
    for one in [*nova.deleted][:3]:
        del nova.deleted[one]
    run_job_until_quiet()
    assert instances_with_requests() == set()


@pytest.mark.slow
def test_S1_a_proven_nova_that_suddenly_knows_none_of_our_instances_frees_nothing_until_it_is_confirmed(
    nova: FakeNova,
) -> None:
    """Behind the same address is another Nova, or the database of Nova was emptied, while the guests run."""
    nova.servers = instances = bind_instances(4)
    run_job_after_a_minute()
    nova.servers = []
    run_job_until_quiet()
    assert instances_with_requests() == set(instances)
    assert backlog.read_backlog().unknown_to_nova == 4
    assert Event.objects.get(action="nova.distrusted").changes["endpoint"] == [nova.url, None]
    endpoints.confirm_endpoint(NovaEndpoint.objects.get().uuid, "olga", "the cloud was installed anew")
    run_job_after_a_minute()
    assert instances_with_requests() == set()
    assert backlog.read_backlog().unknown_to_nova == 0


@pytest.mark.slow
def test_S1_instances_that_become_unknown_one_after_the_other_are_counted_together(
    nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run gets two answers only."""
    monkeypatch.setattr(deleted_instances, "MAX_LOOKUPS", 2)
    nova.servers = instances = bind_instances(6)
    run_job_after_a_minute()
    nova.servers = []
    for _ in range(4):
        run_job_after_a_minute()
    Vanished.objects.update(since=LONG_AGO)
    run_job_until_quiet()
    assert instances_with_requests() == set(instances)


def test_S1_a_confirmation_from_before_the_first_404_does_not_count(nova: FakeNova) -> None:
    instances = bind_instances(4)
    NovaEndpoint.objects.create(url=nova.url, confirmed_at=LONG_AGO)
    for _ in range(3):
        run_job_after_a_minute()
        Vanished.objects.update(since="2020-01-02T00:00:00Z")
    assert instances_with_requests() == set(instances)
    assert not NovaEndpoint.objects.get().is_trusted


@pytest.mark.slow
def test_an_address_that_is_distrusted_is_trusted_again_when_it_shows_one_of_our_instances(nova: FakeNova) -> None:
    nova.servers = [_, *alive] = bind_instances(4)
    run_job_after_a_minute()
    nova.servers = []
    run_job_until_quiet()
    assert not NovaEndpoint.objects.get().is_trusted
    nova.servers = alive
    run_job_until_quiet()
    assert instances_with_requests() == set(alive)
    assert backlog.read_backlog().unknown_to_nova == 0


def test_S1_another_address_of_nova_has_to_prove_itself_again(nova: FakeNova, settings: Any) -> None:
    nova.servers = instances = bind_instances(2)
    run_job_after_a_minute()
    with running_nova() as other:
        settings.KEYS.nova_endpoint = other.url
        for _ in range(3):
            run_job_after_a_minute()
            Vanished.objects.update(since=LONG_AGO)
        assert instances_with_requests() == set(instances)
        other.servers = instances[1:]
        run_job_after_a_minute()
        Vanished.objects.update(since=LONG_AGO)
        run_job_after_a_minute()
        assert instances_with_requests() == {instances[1]}


def test_S1_an_answer_of_another_address_does_not_count_as_the_first_of_two(nova: FakeNova, settings: Any) -> None:
    gone, *alive = bind_instances(2)
    nova.servers = alive
    other = NovaEndpoint.objects.create(url="http://elsewhere", proven_at=LONG_AGO)
    Vanished.objects.create(instance=gone, since=LONG_AGO, endpoint=other)
    run_job_after_a_minute()
    assert gone in instances_with_requests()
    assert Vanished.objects.get().endpoint == NovaEndpoint.objects.get(url=nova.url)
