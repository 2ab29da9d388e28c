"""Test that a device with failed health leaves the offer in every path, and how it comes back (promises S1, S3)."""

from __future__ import annotations

import itertools
import threading
from uuid import UUID, uuid4

import msgspec
import pytest
from django.db import connection

from accelerators import conductor
from accelerators.admin import device_summaries
from accelerators.admin.topology_svg import HandleState
from accelerators.devices import lifecycle
from accelerators.domain import offer
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceState, Health
from accelerators.inventory import merge
from accelerators.models import AcceleratorRequest, Command, Device, Event, Host, Intent
from accelerators.models.devices import build_offered_condition
from accelerators.requests import candidates, capacity
from accelerators.requests.capacity import CapacityQuery
from cyborgweb.telemetry import census
from placement_sync import mapping
from placement_sync.agent_writer import ProviderWork
from placement_sync.apply_writes import SyncOutcome
from placement_sync.jobs import repository, writer_election
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report, make_report
from tests.support.requests import bind_new_requests, create_profiles

pytestmark = pytest.mark.django_db
ADMIN = Caller("ops", "u", frozenset({"admin"}), "p")


class OfferedCard:
    """A ready card with three units on host cmp1, one of which a request holds."""

    def __init__(self) -> None:
        self.host, self.seq = get_or_create_host(), 0
        create_profiles(plain={})
        self.report("ok")
        self.device = Device.objects.get()
        lifecycle.enable_device(self.device.uuid, ADMIN)
        self.provider = str(self.device.deployables.get().rp_uuid)
        self.holder = self.bind()
        self.forget_intents()

    def report(self, health: str, reason: str = "") -> None:
        """Apply a report in which the card has this health."""
        self.seq += 1
        card = make_card(1, handles=3, status=health, status_reason=reason)
        apply_report(self.host, make_driver_report(card), seq=self.seq)

    def bind(self) -> AcceleratorRequest:
        """Bind a new request to the card; raise RefusedError if it is refused."""
        (request,) = bind_new_requests("plain", self.provider)
        return request

    def forget_intents(self) -> None:
        """Delete the intents, so that a new one is seen."""
        with conductor.writing():
            Intent.objects.all().delete()

    def count_offered_units(self) -> dict[str, int]:
        """Return how many units each path of the product offers to new requests."""
        outcome = SyncOutcome(root=str(uuid4()))
        writer_election.delegate_writes(self.host, outcome)
        payload = Command.objects.filter(op="placement").latest("id").arguments["payload"]
        (sent,) = msgspec.json.decode(payload, type=ProviderWork).desired.values()
        (desired,) = mapping.compute_desired_providers(repository.load_deployables(self.host))[0].values()
        (group,) = capacity.query_groups([CapacityQuery(by=["host"], limit=2)])[0]
        self.device.refresh_from_db()
        device = Device.objects.select_related("host").get()
        (card,) = device_summaries.load_cards([device])
        return {
            "candidates of an attachment": sum(one.free for one in candidates.find_candidates(self.host)),
            "capacity": group.free or 0,
            "units in the picture": card.handle_counts[HandleState.FREE.value],
            "Placement, by the conductor": desired.total - desired.reserved - 1,
            "Placement, by the agent": sent.total - sent.reserved - 1,
        }


@pytest.fixture
def card() -> OfferedCard:
    return OfferedCard()


def test_S3_a_device_with_failed_health_is_offered_by_no_path_and_its_holder_keeps_its_unit(card: OfferedCard) -> None:
    assert set(card.count_offered_units().values()) == {2}
    card.report("failed", "it does not answer on the bus")
    assert Intent.objects.filter(kind="provider", key=str(card.host.uuid)).exists(), "Placement has to be told"
    offered = card.count_offered_units()
    all_reserved = -1
    assert offered.pop("Placement, by the conductor") == offered.pop("Placement, by the agent") == all_reserved
    assert set(offered.values()) == {0}
    with pytest.raises(RefusedError, match="the health of its device is failed: it is offered again when") as refused:
        card.bind()
    assert refused.value.reason == RefusalReason.NONE_FREE
    card.holder.refresh_from_db()
    assert (card.holder.state, card.holder.attach_handle is not None) == ("Bound", True)
    assert Device.objects.get().state == "ready", "the operator's decision stays"


def test_a_census_counts_no_instances_for_a_device_with_failed_health(card: OfferedCard) -> None:
    assert candidates.find_candidates_by_host([card.host.pk])[card.host.pk]
    card.report("failed", "dead")
    assert not candidates.find_candidates_by_host([card.host.pk])[card.host.pk]
    assert census.candidates is candidates, "the census asks the same function"


@pytest.mark.parametrize(("recovered", "is_back"), [("ok", True), ("degraded", True), ("unknown", False)])
def test_a_failure_ends_with_ok_or_degraded_but_not_with_unknown(
    card: OfferedCard, recovered: str, is_back: bool
) -> None:
    card.report("failed", "dead")
    card.forget_intents()
    card.report(recovered, "as it is")
    device = Device.objects.get()
    assert Intent.objects.filter(kind="provider").exists() == is_back
    if is_back:
        assert (device.status, device.status_reason) == (recovered, "as it is")
        assert set(card.count_offered_units().values()) == {2}
        assert card.bind().state == "Bound"
    else:
        assert (device.status, device.status_reason) == ("failed", "dead (its driver cannot read its health now)")
        events = Event.objects.count()
        card.report(recovered, "as it is")
        assert Event.objects.count() == events, "the same report again changes nothing"
        card.report("ok")
        assert (Device.objects.get().status, card.bind().state) == ("ok", "Bound")


@pytest.mark.django_db(transaction=True)
def test_a_bind_during_the_merge_of_a_failure_waits_for_its_commit_and_is_refused(card: OfferedCard) -> None:
    merged, may_commit = threading.Event(), threading.Event()

    def merge_slowly() -> None:
        with conductor.writing():
            card.report("failed", "dead")
            merged.set()
            may_commit.wait(10)
        connection.close()

    thread = threading.Thread(target=merge_slowly, daemon=True)
    thread.start()
    assert merged.wait(10)
    threading.Timer(0.2, may_commit.set).start()
    with pytest.raises(RefusedError, match="the health of its device is failed"):
        card.bind()
    assert may_commit.is_set()
    thread.join(10)


def test_a_failure_between_two_reports_of_one_batch_is_not_lost(card: OfferedCard) -> None:
    reports = [
        make_report(make_driver_report(make_card(1, handles=3, status=health, status_reason=reason)), seq=10 + n)
        for n, (health, reason) in enumerate([("failed", "dead"), ("unknown", "cannot be read")])
    ]
    merge.merge_reports({card.host.id: reports})
    assert Device.objects.get().status == "failed"


def test_a_health_that_does_not_concern_the_offer_does_not_wake_placement(card: OfferedCard) -> None:
    for health in ("degraded", "unknown", "ok"):
        card.report(health, "x" if health != "ok" else "")
    assert not Intent.objects.filter(kind="provider").exists()


def test_the_function_the_sql_and_the_condition_of_the_offer_agree_for_every_state_and_health(
    card: OfferedCard,
) -> None:
    for state, health in itertools.product(DeviceState, Health):
        with conductor.writing():
            Device.objects.update(state=state.value, status=health.value)
        expected = offer.is_offered(state, health)
        assert expected == (state == DeviceState.READY and health != Health.FAILED)
        assert Device.objects.filter(build_offered_condition()).exists() == expected
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT count(*) FROM accelerators_device d WHERE {offer.IS_OFFERED_SQL}")
            assert cursor.fetchone() == (int(expected),)


def test_a_device_found_with_failed_health_is_not_offered_when_it_is_enabled() -> None:
    host: Host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1, status="failed", status_reason="dead on arrival")))
    device = Device.objects.get()
    lifecycle.enable_device(UUID(str(device.uuid)), ADMIN)
    (record,) = repository.load_deployables(host)
    assert (Device.objects.get().state, record.is_offered) == ("ready", False)
    assert candidates.find_candidates(host) == []
