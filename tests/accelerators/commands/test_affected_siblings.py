"""Test commands that affect other devices of the host, too, as the driver declares it: they must be free as well."""

from __future__ import annotations

from functools import partial
from uuid import UUID, uuid4

import msgspec
import pytest
from pytest_django import DjangoAssertNumQueries

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.devices import lifecycle
from accelerators.domain import driver_status
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AcceleratorRequest, AttachHandle, Command, Deployable, Device, DeviceProfile, Host
from accelerators.workflows import bulk_commands, command_endings
from drivers.inventory import DriverDeclaration, DriverReport
from drivers.plan import get_affected_prefix
from tests.support.holders import answer_each, slow_holder_checks
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.statements import count_call_statements

pytestmark = pytest.mark.django_db
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
ACTS = "health partition reset uninstall"
FIRST, SAME_CARD, SAME_BUS, OTHER_BUS = "0000:01:00.0", "0000:01:00.1", "0000:01:01.0", "0000:02:00.0"


def make_reports(affects: dict[str, str] | None) -> list[DriverReport]:
    """Return the reports of a driver with one card, and of another driver with three; `affects` is the declaration."""
    first = make_card(1, acts=ACTS)
    others = [
        make_card(n, key=f"pci:{address}", address=address, deployables=(), acts=ACTS)
        for n, address in enumerate((SAME_CARD, SAME_BUS, OTHER_BUS))
    ]
    declares = None if affects is None else DriverDeclaration(affects=affects)
    report = msgspec.structs.replace(make_driver_report(first), declares=declares)
    return [report, make_driver_report(*others, driver="other_driver")]


def report_cards(affects: dict[str, str] | None, seq: int = 1) -> Device:
    """Merge these reports; return the first card."""
    apply_report(get_or_create_host(), *make_reports(affects), seq=seq)
    return Device.objects.select_related("host").get(address=FIRST)


def hold(*addresses: str) -> safety.HolderCheckResult:
    """Return the answer of a holder check that says that somebody holds these devices."""
    return safety.HolderCheckResult((f"instance on {addresses[0]}",))


def busy_addresses() -> set[str]:
    return set(Device.objects.filter(busy_with__isnull=False).values_list("address", flat=True))


@pytest.mark.parametrize(
    ("scope", "affected"),
    [
        ("card", {SAME_CARD}),
        ("bus", {SAME_CARD, SAME_BUS}),
        ("host", {SAME_CARD, SAME_BUS, OTHER_BUS}),
        ("a scope of the future", {SAME_CARD, SAME_BUS, OTHER_BUS}),
        ("device", set()),
    ],
)
def test_S1_a_reset_is_refused_while_another_device_that_it_affects_is_held(scope: str, affected: set[str]) -> None:
    device = report_cards({"reset": scope})
    assert {one.address for one in safety.find_affected_siblings(device, "reset")} == affected
    for address in (SAME_CARD, SAME_BUS, OTHER_BUS):

        def check(one: Device, held: str = address) -> safety.HolderCheckResult:
            return hold(held) if one.address == held else safety.HolderCheckResult()

        with safety.HOLDER_CHECKS.replaced("placement", answer_each(check)):
            if address in affected:
                with pytest.raises(RefusedError, match=f"cannot be affected by the reset of device {device.uuid}") as e:
                    command_queue.order_device_command("reset", device.uuid, OLGA)
                assert e.value.reason == RefusalReason.IN_USE and not Command.objects.exists()
    command = command_queue.order_device_command("reset", device.uuid, OLGA)
    assert busy_addresses() == {FIRST, *affected}
    command_queue.store_answers([CommandAnswer(command.host_id, command.id, "succeeded")])
    while command_endings.end_answered_commands():
        pass
    assert busy_addresses() == set(), "they can be bound again when the command has ended"


def test_a_device_that_is_affected_by_a_running_command_takes_no_exclusive_command_of_its_own() -> None:
    device = report_cards({"reset": "card"})
    sibling = Device.objects.get(address=SAME_CARD)
    command = command_queue.order_device_command("reset", device.uuid, OLGA)
    with pytest.raises(RefusedError, match="is busy with reset"):
        command_queue.order_device_command("reset", sibling.uuid, OLGA)
    command_queue.store_answers([CommandAnswer(command.host_id, command.id, "succeeded")])
    while command_endings.end_answered_commands():
        pass
    command_queue.order_device_command("reset", sibling.uuid, OLGA)
    with pytest.raises(RefusedError, match="is busy with reset"):
        command_queue.order_device_command("reset", device.uuid, OLGA)


def test_busy_devices_are_refused_with_the_same_number_of_statements_whatever_their_number() -> None:
    cards = [make_card(n, acts=ACTS) for n in range(12)]
    apply_report(get_or_create_host(), make_driver_report(*cards))
    chosen = {one.uuid: one.lifecycle_text for one in Device.objects.order_by("id")}

    def reset(uuids: list[UUID]) -> set[tuple[str, RefusalReason | None]]:
        """Order a reset of these devices; return the outcomes."""
        words = {uuid: chosen[uuid] for uuid in uuids}
        answers = bulk_commands.ask_holders_for_each("reset", None, words)
        results = bulk_commands.place_command_for_each("reset", None, words, OLGA, "", answers)
        return {(result.outcome, result.reason) for result in results}

    def enable(uuids: list[UUID]) -> set[tuple[str, RefusalReason | None]]:
        """Enable these devices; return the outcomes."""
        return {(result.outcome, result.reason) for result in lifecycle.apply_action(Action.ENABLE, uuids, OLGA)}

    assert reset([*chosen]) == {("moved", None)}
    for act in (reset, enable):
        assert act([*chosen]) == {("refused", RefusalReason.CONFLICT)}
        few, many = (count_call_statements(partial(act, uuids)) for uuids in ([*chosen][:2], [*chosen]))
        assert few == many


def test_S1_of_two_devices_of_a_slice_that_affect_each_other_one_is_ordered() -> None:
    device = report_cards({"reset": "card"})
    devices = [device, *Device.objects.filter(address__in=(SAME_CARD, OTHER_BUS)).order_by("id")]
    chosen = {one.uuid: one.lifecycle_text for one in devices}
    answers = bulk_commands.ask_holders_for_each("reset", None, chosen)
    results = bulk_commands.place_command_for_each("reset", None, chosen, OLGA, "", answers)
    assert [result.uuid for result in results] == list(chosen)
    assert sorted((result.outcome, result.reason) for result in results) == [
        ("moved", None),
        ("moved", None),
        ("refused", RefusalReason.CONFLICT),
    ]
    assert next(result.outcome for result in results if result.uuid == devices[-1].uuid) == "moved"
    assert Command.objects.count() == 2 and busy_addresses() == {SAME_CARD, OTHER_BUS}


def test_acts_without_a_declaration_affect_the_device_alone_and_cost_no_statement(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    for seq, declaration in enumerate((None, {"reset": "host"}), 1):
        device = report_cards(declaration, seq=seq)
        with django_assert_num_queries(0):
            assert safety.find_affected_siblings(device, "partition") == []


def test_the_declaration_of_a_driver_is_stored_and_stays_when_an_older_agent_reports() -> None:
    report_cards({"reset": "card"})
    stored = Host.objects.get().drivers["test_driver"]["declares"]
    assert stored == {"affects": {"reset": "card"}}
    report_cards(None, seq=2)
    assert Host.objects.get().drivers["test_driver"]["declares"] == stored
    report_cards({}, seq=3)
    assert driver_status.get_declared_scope(Host.objects.get().drivers["test_driver"], "reset") == "device"


@pytest.mark.parametrize(
    ("scope", "address", "prefix"),
    [
        ("device", FIRST, None),
        ("card", FIRST, "0000:01:00."),
        ("bus", "10000:e1:00.0", "10000:e1:"),
        ("host", FIRST, ""),
        ("card", None, ""),
        ("", FIRST, ""),
    ],
)
def test_the_scope_determines_how_affected_addresses_begin(scope: str, address: str | None, prefix: str | None) -> None:
    assert get_affected_prefix(scope, address) == prefix


def test_S1_a_reset_is_refused_in_time_if_the_holder_checks_of_what_it_affects_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A person waits for the answer, and the sweep and other jobs for their turn."""
    device = report_cards({"reset": "host"})
    with (
        slow_holder_checks(monkeypatch) as asked,
        pytest.raises(RefusedError, match="there was no time left to ask: try again") as refused,
    ):
        command_queue.order_device_command("reset", device.uuid, OLGA)
    assert (refused.value.reason, [one.address for one in asked]) == (RefusalReason.UNAVAILABLE, [FIRST])
    assert not Command.objects.exists() and busy_addresses() == set()


def test_S1_the_resets_of_a_bulk_action_share_one_time_for_the_holder_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    device = report_cards({"reset": "host"})
    chosen = {one.uuid: one.lifecycle_text for one in Device.objects.filter(address__in=[FIRST, SAME_CARD])}
    with slow_holder_checks(monkeypatch) as asked:
        answers = command_queue.ask_holders_for_command("reset", Device.objects.filter(uuid__in=chosen))
        results = bulk_commands.place_command_for_each("reset", None, chosen, OLGA, "", answers)
    assert device.uuid in chosen and [one.address for one in asked] == [FIRST]
    assert [(result.outcome, result.reason) for result in results] == [("refused", RefusalReason.UNAVAILABLE)] * 2
    assert all("there was no time left to ask: try again" in result.text for result in results)


@pytest.mark.parametrize("is_bulk", [False, True])
def test_S1_a_held_sibling_that_the_database_knows_is_named_without_asking_other_services(is_bulk: bool) -> None:
    """Placement and Nova may need seconds, and cannot change this refusal."""
    device = report_cards({"reset": "host"})
    with conductor.writing():
        part = Deployable.objects.create(device=Device.objects.get(address=OTHER_BUS), name="part", num_accelerators=1)
        handle = AttachHandle.objects.create(deployable=part, attach_type="PCI", attach_info="{}")
        profile = DeviceProfile.objects.create(name="one", groups=[])
        holding = {"state": "Bound", "project_id": "p1", "group": {}, "profile": profile, "instance_uuid": uuid4()}
        request = AcceleratorRequest.objects.create(deployable=part, attach_handle=handle, **holding)
    asked: list[int] = []

    def check(one: Device) -> safety.HolderCheckResult:
        asked.append(one.pk)
        return safety.HolderCheckResult()

    with safety.HOLDER_CHECKS.replaced("placement", answer_each(check)):
        if is_bulk:
            chosen = {device.uuid: device.lifecycle_text}
            answers = bulk_commands.ask_holders_for_each("reset", None, chosen)
            (result,) = bulk_commands.place_command_for_each("reset", None, chosen, OLGA, "", answers)
            reason, text = result.reason, result.text
        else:
            with pytest.raises(RefusedError) as refused:
                command_queue.order_device_command("reset", device.uuid, OLGA)
            reason, text = refused.value.reason, refused.value.text
    assert (reason, f"request {request.uuid}" in text, asked) == (RefusalReason.IN_USE, True, [])
