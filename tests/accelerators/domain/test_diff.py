"""Test properties of the comparison of reports with stored devices: it is idempotent and independent of their order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerators.domain.diff import (
    REPORTED_DEVICE_FIELDS,
    HostReport,
    InventoryChanges,
    StoredAttribute,
    StoredDeployable,
    StoredDevice,
    StoredHandle,
    StoredHost,
    collect_changes,
    combine_reports,
)
from drivers.inventory import Backend, Device, DriverReport
from tests.support.reports import make_card

cards = st.lists(st.integers(0, 9), unique=True, max_size=6).map(
    lambda ns: tuple(make_card(n, handles=1 + n % 3) for n in ns)
)
answers_or_failure = st.one_of(cards, st.just("it failed"))
histories = st.lists(st.tuples(answers_or_failure, answers_or_failure), min_size=1, max_size=5)


def build_report(seq: int, first_answer: object, second_answer: object) -> HostReport:
    driver_reports = [
        DriverReport(name, error=what) if isinstance(what, str) else DriverReport(name, devices=what)  # type: ignore[arg-type]
        for name, what in (
            ("one", first_answer),
            ("two", () if isinstance(second_answer, str) is False else second_answer),
        )
    ]
    return HostReport(1, seq, "h" * 32, tuple(driver_reports))


def build_stored_host(
    devices: tuple[StoredDevice, ...] = (), drivers: dict[str, dict[str, object]] | None = None
) -> StoredHost:
    return StoredHost(1, "u", "cmp1", 0, 0, drivers or {}, devices, node="cmp1")


def compare_reports(host: StoredHost, reports: list[HostReport], now: str = "now") -> InventoryChanges:
    changes = InventoryChanges()
    folded = combine_reports(reports, (host.epoch, host.seq))
    assert folded
    collect_changes(host, *folded, now, changes)
    return changes


def build_stored_devices(changes: InventoryChanges) -> tuple[StoredDevice, ...]:
    """Return the devices that a database would hold after `changes` were applied to an empty one."""
    result = []
    for row in changes.devices:
        parts = tuple(_deployable(p, changes) for p in changes.deployables if p["device"] == row["uuid"])
        facts = tuple(row[name] for name in REPORTED_DEVICE_FIELDS)
        result.append(StoredDevice(row["uuid"], row["key"], "inactive", None, facts, parts))
    return tuple(result)


def _deployable(row: dict[str, object], changes: InventoryChanges) -> StoredDeployable:
    attributes = [a for a in changes.attributes if a["deployable"] == row["uuid"]]
    handles = [h for h in changes.handles if h["deployable"] == row["uuid"]]
    return StoredDeployable(
        1,
        str(row["uuid"]),
        str(row["name"]),
        row["num"],  # type: ignore[arg-type]
        str(row["driver_name"]),
        False,
        tuple(StoredAttribute(i, a["key"], a["value"], "agent") for i, a in enumerate(attributes)),
        tuple(StoredHandle(i, h["type"], h["info"], False) for i, h in enumerate(handles)),
    )


@given(cards)
def test_applying_the_same_report_twice_changes_nothing(devices: tuple[Device, ...]) -> None:
    first = compare_reports(build_stored_host(), [build_report(1, devices, "x")])
    again = compare_reports(
        build_stored_host(build_stored_devices(first), first.hosts[0]["drivers"]), [build_report(2, devices, "x")]
    )
    assert not (
        again.devices or again.deployables or again.attributes or again.handles or again.state_changes or again.events
    )
    assert not (again.gone_attributes or again.missing_handles or again.missing_deployables or again.provider_intents)


@pytest.mark.parametrize(
    ("first", "second", "since"),
    [((), (), "now"), ("it failed", "it failed", "now"), ((), "it failed", "later"), ("it failed", (), "later")],
)
def test_a_driver_has_its_error_since_the_report_that_first_said_so(first: object, second: object, since: str) -> None:
    drivers = compare_reports(build_stored_host(), [build_report(1, first, ())]).hosts[0]["drivers"]
    after = compare_reports(build_stored_host(drivers=drivers), [build_report(2, second, ())], "later")
    assert after.hosts[0]["drivers"]["one"]["since"] == since


@given(cards, answers_or_failure)
def test_only_devices_absent_from_a_successful_answer_become_missing(
    devices: tuple[Device, ...], following: object
) -> None:
    first = compare_reports(build_stored_host(), [build_report(1, devices, "x")])
    following_report = build_report(2, following, "x")
    after = compare_reports(
        build_stored_host(build_stored_devices(first), first.hosts[0]["drivers"]), [following_report]
    )
    named = {d.key for d in following_report.drivers[0].devices}
    gone = {d.key for d in devices} - named
    missing = {row["uuid"] for row in after.state_changes if row["state"] == "missing"}
    expected = (
        set() if following_report.drivers[0].error else {d.uuid for d in build_stored_devices(first) if d.key in gone}
    )
    assert missing == expected


@given(histories, st.randoms())
def test_combining_reports_gives_the_same_result_in_any_order_of_arrival(
    history: list[tuple[object, object]], random: object
) -> None:
    reports = [build_report(n + 1, *entry) for n, entry in enumerate(history)]
    shuffled = list(reports)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, two = combine_reports(reports, (0, 0)), combine_reports(shuffled, (0, 0))
    assert one == two


numbers = st.one_of(st.none(), st.sets(st.integers(0, 2)))
cards_by_backend = st.dictionaries(st.sampled_from(["a", "b", "c"]), numbers)
"""Backend → the numbers of its cards; None means that the backend failed."""
cards_of_all_backends = st.fixed_dictionaries(dict.fromkeys("abc", numbers))


def build_backends_report(seq: int, answered: dict[str, set[int] | None]) -> HostReport:
    found = (build_numbered_card(name, n) for name, numbers in answered.items() for n in numbers or ())
    parts = tuple(
        Backend(name, "pci", error="" if found is not None else "it hung") for name, found in answered.items()
    )
    return HostReport(1, seq, "h" * 32, (DriverReport("one", devices=tuple(found), backends=parts),))


def build_numbered_card(backend: str, bus: int) -> Device:
    return make_card(16 * "abc".index(backend) + bus, backend=backend)


@given(cards_by_backend, st.lists(cards_of_all_backends, min_size=1, max_size=3))
def test_devices_become_missing_only_when_their_backend_answered_without_them(
    before: dict[str, set[int] | None], batch: list[dict[str, set[int] | None]]
) -> None:
    first = compare_reports(build_stored_host(), [build_backends_report(1, before)])
    known = {device.uuid: device.key for device in build_stored_devices(first)}
    after = compare_reports(
        build_stored_host(build_stored_devices(first), first.hosts[0]["drivers"]),
        [build_backends_report(n + 2, one) for n, one in enumerate(batch)],
    )
    expected = set()
    for name, numbers in before.items():
        now: set[int] | None = numbers
        for one in batch:
            now = set() if name not in one else now if one[name] is None else one[name]
        expected |= {build_numbered_card(name, n).key for n in (numbers or set()) - (now or set())}
    assert {known[row["uuid"]] for row in after.state_changes if row["state"] == "missing"} == expected


def test_devices_of_a_backend_that_is_no_longer_configured_become_missing() -> None:
    first = compare_reports(build_stored_host(), [build_backends_report(1, {"a": {0}, "b": {0}})])
    after = compare_reports(
        build_stored_host(build_stored_devices(first), first.hosts[0]["drivers"]),
        [build_backends_report(2, {"a": None})],
    )
    (gone,) = [device for device in build_stored_devices(first) if device.key == build_numbered_card("b", 0).key]
    assert [(row["uuid"], row["state"]) for row in after.state_changes] == [(gone.uuid, "missing")]


@given(cards_by_backend)
def test_applying_the_same_backends_twice_changes_nothing(said: dict[str, set[int] | None]) -> None:
    first = compare_reports(build_stored_host(), [build_backends_report(1, said)])
    again = compare_reports(
        build_stored_host(build_stored_devices(first), first.hosts[0]["drivers"]),
        [build_backends_report(2, said)],
        "later",
    )
    assert not (again.devices or again.state_changes or again.events)
    assert again.hosts[0]["drivers"] == first.hosts[0]["drivers"]


@given(cards)
def test_each_new_device_makes_exactly_one_event(devices: tuple[Device, ...]) -> None:
    changes = compare_reports(build_stored_host(), [build_report(1, devices, ())])
    found = [event for event in changes.events if event["action"].startswith("device.")]
    assert len(found) == len({event["subject"] for event in found}) == len(devices)


def test_devices_of_a_failed_backend_stay_unchanged_and_no_other_backend_takes_them() -> None:
    first = compare_reports(build_stored_host(), [build_backends_report(1, {"a": {0}, "b": set()})])
    carried, greedy = make_card(0, backend="a", model="said once more"), make_card(0, backend="b")
    new = make_card(9, backend="b")
    parts = (Backend("a", "pci", error="it hung"), Backend("b", "pci"))
    for devices in ((carried,), (greedy,)):
        driver_reports = (
            DriverReport("two", devices=(greedy, new)),
            DriverReport("one", devices=devices, backends=parts),
        )
        after = compare_reports(
            build_stored_host(build_stored_devices(first), first.hosts[0]["drivers"]),
            [HostReport(1, 2, "h" * 32, driver_reports)],
        )
        assert [row["key"] for row in after.devices] == [new.key], "what nobody else has is found"
        assert not (after.state_changes or after.missing_handles or after.missing_deployables)


@pytest.mark.parametrize(
    ("later", "health"),
    [
        ({"key": "pci:0000:01:00.0"}, "failed"),
        ({"key": "pci:0000:01:00.0", "model": "1045"}, "unknown"),
        ({"key": "serial:S2"}, "unknown"),
    ],
)
def test_a_failure_of_an_earlier_report_lasts_if_the_serial_number_cannot_be_read_any_more(
    later: dict[str, Any], health: str
) -> None:
    failed = make_card(1, key="serial:S1", status="failed", status_reason="it is hot")
    unknown = make_card(1, status="unknown", **later)
    reports = [
        HostReport(1, n, "h" * 32, (DriverReport("one", devices=(card,)),)) for n, card in ((1, failed), (2, unknown))
    ]
    (row,) = compare_reports(build_stored_host(), reports).devices
    assert row["status"] == health
    assert ("it is hot" in row["status_reason"]) is (health == "failed")
