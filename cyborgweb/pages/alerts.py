"""List what needs an operator, as sentences with a link to where it can be fixed, the worst first. No database
access.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import urlencode

from django.urls import reverse

from accelerators.runtime import jobs
from accelerators.ui.badges import lasted
from cyborgweb.monitoring.backlog import NEAR_S, Work
from cyborgweb.pages.capacity import Capacity

LATE = timedelta(seconds=60)
"""How far Placement and Nova may be behind before it is shown."""
SLOW = timedelta(seconds=15)
"""How long reports and wake-ups may wait for our own workers before it is shown."""
ERROR = 160


@dataclass(frozen=True)
class Need:
    """One line of the list: its tone (of `badges.mark`), a word for it, the text of the link (`what`), the rest of
    the sentence (`then`), and the link's address.
    """

    tone: str
    word: str
    what: str
    then: str
    url: str


@dataclass(frozen=True)
class House:
    """Everything that the list is made from. `devices`: number of devices by state."""

    hosts: Mapping[str, int]
    devices: Counter[str]
    work: Work
    classes: Sequence[Capacity]
    failing: int
    faults: int
    now: datetime


def needs(house: House) -> list[Need]:
    """Return what needs an operator: first what is bad, then warnings, then what only waits for a decision."""
    found = [*_hardware(house), *_hosts(house), *_told(house), *_work(house), *_capacity(house)]
    return sorted(found, key=lambda need: ("bad", "warn", "calm").index(need.tone))


def _hardware(house: House) -> Iterator[Need]:
    work, of = house.work, house.devices
    if n := work.missing_held:
        lost = "still held by instances: repair the host first, then the instances."
        yield Need("bad", "missing", some(n, "device"), lost, listed("device", state__exact="missing"))
    if n := work.discrepancies:
        says = "between this service, Placement and Nova; each of them says what to do."
        url = reverse("admin:placement_sync_discrepancy_changelist")
        yield Need("bad", "differs", some(n, "contradiction"), says, url)
    if n := of["failed"]:
        why = "failed: read the reason, then enable or retire."
        yield Need("bad", "failed", some(n, "device"), why, listed("device", state__exact="failed"))
    if n := work.broken:
        broken = "with broken hardware, as the driver reports: drain, then replace."
        yield Need("bad", "broken", some(n, "device"), broken, listed("device", status__exact="failed"))
    if n := work.degraded:
        degraded = "degraded, as the driver reports: plan an inspection."
        yield Need("warn", "degraded", some(n, "device"), degraded, listed("device", status__exact="degraded"))
    if n := of["missing"] - work.missing_held:
        gone = "no longer reported by the driver: put back, or retire."
        yield Need("warn", "missing", some(n, "device"), gone, listed("device", state__exact="missing"))
    if n := of["inactive"]:
        decide = "waiting for a decision: enable, or write an admission rule."
        yield Need("calm", "new", some(n, "device"), decide, listed("device", state__exact="inactive"))


def _hosts(house: House) -> Iterator[Need]:
    if n := house.hosts["down"]:
        silent = "down, so the data shown of the host is old: start cyborg-agent there."
        yield Need("bad", "down", some(n, "agent"), silent, f"{reverse('admin:agents_agent_changelist')}?is=down")
    if n := house.failing:
        answer = "failing: the reasons are listed below."
        yield Need("bad", "failing", some(n, "driver"), answer, "#failing")
    if n := house.faults:
        taken = "skipped by drivers: the reasons are listed below."
        yield Need("warn", "faults", some(n, "piece of hardware", "pieces of hardware"), taken, "#faults")


def _told(house: House) -> Iterator[Need]:
    work = house.work
    if n := work.stuck:
        error = next((one.error for one in work.intents.values() if one.stuck and one.error), "")
        failed = _so("failed ten times or more", error)
        yield Need("bad", "stuck", some(n, "intent"), failed, listed("intent", stuck="yes"))
    trees, notices = reverse("admin:placement_sync_tree_changelist") + "?is=behind", listed("intent", kind="notice")
    for name, kind, told, url in (
        ("Placement", "provider", work.placement, trees),
        ("Nova", "notice", work.nova, notices),
    ):
        if jobs.has_taker(kind) and not told.stuck and told.oldest and house.now - told.oldest > LATE:
            behind = f"is behind by {lasted(told.oldest, house.now)}, {some(told.number, 'change')} waiting"
            yield Need("warn", "behind", name, _so(behind, told.error), url)


def _work(house: House) -> Iterator[Need]:
    work, binding = house.work, listed("acceleratorrequest", state__exact="BindStarted")
    if n := work.overdue:
        late = "past the deadline of the bind, and still not ended: check whether the workers run."
        yield Need("bad", "stuck", some(n, "request"), late, binding)
    if n := work.near - work.overdue:
        soon = f"less than {NEAR_S} s before the deadline of the bind: the host answers slowly."
        yield Need("warn", "late", some(n, "request"), soon, binding)
    if work.spool_oldest and house.now - work.spool_oldest > SLOW:
        waits = f"not merged, the oldest for {lasted(work.spool_oldest, house.now)}: check the cluster “ingest”."
        yield Need("bad", "waiting", some(work.spool, "report"), waits, listed("host"))
    if work.tick_oldest and house.now - work.tick_oldest > SLOW:
        asleep = f"have started no job for {lasted(work.tick_oldest, house.now)}: start the clusters again."
        yield Need("bad", "asleep", "The workers", asleep, listed("intent"))


def _capacity(house: House) -> Iterator[Need]:
    for one in house.classes:
        if one.name and not one.free and one.held:
            out = f"{one.held} held, {one.reserved} not offered"
            yield Need("warn", "full", one.name, f"has no free unit: {out}.", listed("device", state__exact="ready"))


def listed(model: str, **asked: str) -> str:
    """Return the address of a list of the `accelerators` app, filtered by `asked`."""
    url = reverse(f"admin:accelerators_{model}_changelist")
    return f"{url}?{urlencode(asked)}" if asked else url


def some(number: int, one: str, many: str = "") -> str:
    """Return the number with the noun in its singular or plural: `1 device`, `2 devices`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def _so(text: str, error: str) -> str:
    return f"{text}: {error[:ERROR]}{'…' if len(error) > ERROR else ''}" if error else f"{text}."
