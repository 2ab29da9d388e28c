"""Properties of the pure comparison: idempotent, order-free, and it never removes."""

from __future__ import annotations

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
from tests.support.reports import card

cards = st.lists(st.integers(0, 9), unique=True, max_size=6).map(
    lambda ns: tuple(card(n, handles=1 + n % 3) for n in ns)
)
answers = st.one_of(cards, st.just("it failed"))
histories = st.lists(st.tuples(answers, answers), min_size=1, max_size=5)


def report(seq: int, one: object, two: object) -> HostReport:
    said = [
        DriverReport(name, error=what) if isinstance(what, str) else DriverReport(name, devices=what)  # type: ignore[arg-type]
        for name, what in (("one", one), ("two", () if isinstance(two, str) is False else two))
    ]
    return HostReport(1, seq, "h" * 32, tuple(said))


def empty(devices: tuple[StoredDevice, ...] = (), drivers: dict[str, dict[str, object]] | None = None) -> StoredHost:
    return StoredHost(1, "u", "cmp1", 0, 0, drivers or {}, devices)


def run(host: StoredHost, reports: list[HostReport], now: str = "now") -> InventoryChanges:
    changes = InventoryChanges()
    folded = combine_reports(reports, (host.epoch, host.seq))
    assert folded
    collect_changes(host, *folded, now, changes)
    return changes


def stored(changes: InventoryChanges) -> tuple[StoredDevice, ...]:
    """What a database would hold after applying `changes` to nothing."""
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
def test_applying_the_same_twice_changes_nothing(devices: tuple[Device, ...]) -> None:
    first = run(empty(), [report(1, devices, "x")])
    again = run(empty(stored(first), first.hosts[0]["drivers"]), [report(2, devices, "x")])
    assert not (
        again.devices or again.deployables or again.attributes or again.handles or again.state_changes or again.events
    )
    assert not (again.gone_attributes or again.missing_handles or again.missing_deployables or again.provider_intents)


@given(cards, answers)
def test_nothing_is_lost_whatever_is_reported_next(devices: tuple[Device, ...], following: object) -> None:
    first = run(empty(), [report(1, devices, "x")])
    following_report = report(2, following, "x")
    after = run(empty(stored(first), first.hosts[0]["drivers"]), [following_report])
    named = {d.key for d in following_report.drivers[0].devices}
    gone = {d.key for d in devices} - named
    missing = {row["uuid"] for row in after.state_changes if row["state"] == "missing"}
    expected = set() if following_report.drivers[0].error else {d.uuid for d in stored(first) if d.key in gone}
    assert missing == expected


@given(histories, st.randoms())
def test_the_order_of_arrival_does_not_matter(history: list[tuple[object, object]], random: object) -> None:
    reports = [report(n + 1, *entry) for n, entry in enumerate(history)]
    shuffled = list(reports)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, two = combine_reports(reports, (0, 0)), combine_reports(shuffled, (0, 0))
    assert one == two


numbers = st.one_of(st.none(), st.sets(st.integers(0, 2)))
backed = st.dictionaries(st.sampled_from(["a", "b", "c"]), numbers)
"""Backend → the numbers of its cards, None when it failed."""
all_of_them = st.fixed_dictionaries(dict.fromkeys("abc", numbers))


def backends(seq: int, said: dict[str, set[int] | None]) -> HostReport:
    found = (numbered(name, n) for name, numbers in said.items() for n in numbers or ())
    parts = tuple(Backend(name, "pci", error="" if found is not None else "it hung") for name, found in said.items())
    return HostReport(1, seq, "h" * 32, (DriverReport("one", devices=tuple(found), backends=parts),))


def numbered(backend: str, n: int) -> Device:
    return card(16 * "abc".index(backend) + n, backend=backend)


@given(backed, st.lists(all_of_them, min_size=1, max_size=3))
def test_only_a_backend_that_answered_loses_devices(
    before: dict[str, set[int] | None], batch: list[dict[str, set[int] | None]]
) -> None:
    first = run(empty(), [backends(1, before)])
    known = {device.uuid: device.key for device in stored(first)}
    after = run(empty(stored(first), first.hosts[0]["drivers"]), [backends(n + 2, one) for n, one in enumerate(batch)])
    expected = set()
    for name, numbers in before.items():
        now: set[int] | None = numbers
        for one in batch:
            now = set() if name not in one else now if one[name] is None else one[name]
        expected |= {numbered(name, n).key for n in (numbers or set()) - (now or set())}
    assert {known[row["uuid"]] for row in after.state_changes if row["state"] == "missing"} == expected


def test_a_backend_that_is_configured_no_more_has_lost_its_devices() -> None:
    first = run(empty(), [backends(1, {"a": {0}, "b": {0}})])
    after = run(empty(stored(first), first.hosts[0]["drivers"]), [backends(2, {"a": None})])
    (gone,) = [device for device in stored(first) if device.key == numbered("b", 0).key]
    assert [(row["uuid"], row["state"]) for row in after.state_changes] == [(gone.uuid, "missing")]


@given(backed)
def test_the_same_from_backends_twice_changes_nothing(said: dict[str, set[int] | None]) -> None:
    first = run(empty(), [backends(1, said)])
    again = run(empty(stored(first), first.hosts[0]["drivers"]), [backends(2, said)], "later")
    assert not (again.devices or again.state_changes or again.events)
    assert again.hosts[0]["drivers"] == first.hosts[0]["drivers"]


@given(cards)
def test_one_event_per_device(devices: tuple[Device, ...]) -> None:
    changes = run(empty(), [report(1, devices, ())])
    found = [event for event in changes.events if event["subject_type"] == "device"]
    assert len(found) == len({event["subject"] for event in found}) == len(devices)


def test_what_a_failed_backend_had_is_as_it_was_and_nobody_elses() -> None:
    first = run(empty(), [backends(1, {"a": {0}, "b": set()})])
    carried, greedy = card(0, backend="a", model="said once more"), card(0, backend="b")
    new = card(9, backend="b")
    parts = (Backend("a", "pci", error="it hung"), Backend("b", "pci"))
    for devices in ((carried,), (greedy,)):
        said = (DriverReport("two", devices=(greedy, new)), DriverReport("one", devices=devices, backends=parts))
        after = run(empty(stored(first), first.hosts[0]["drivers"]), [HostReport(1, 2, "h" * 32, said)])
        assert [row["key"] for row in after.devices] == [new.key], "what nobody else has is found"
        assert not (after.state_changes or after.missing_handles or after.missing_deployables)
