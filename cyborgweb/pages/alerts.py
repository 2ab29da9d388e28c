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

from accelerators import slow_neighbours
from accelerators.domain.bind_failures import ADVICE
from accelerators.domain.choices import Tone
from accelerators.requests import refused_binds
from accelerators.runtime import jobs
from accelerators.ui.badges import format_duration
from cyborgweb.monitoring.backlog import (
    BIND_FAILED_ACTION,
    FAILED_BINDS_MINUTES,
    NEAR_DEADLINE_S,
    REFUSED_CLIENTS_ACTION,
    Backlog,
)
from cyborgweb.pages.capacity import RenderableCapacity

MAX_CLOUD_DELAY = timedelta(seconds=60)
"""How far Placement and Nova may be behind before it is shown."""
MAX_WORKER_DELAY = timedelta(seconds=15)
"""How long reports and wake-ups may wait for our own workers before it is shown."""
SHOW_RESTORE_FOR = timedelta(days=3)
"""How long a restore is shown."""
MAX_ERROR_LENGTH = 160
BINDS_PLACE = "troubleshooting.md#binds-fail-or-are-refused"
"""The part of the manual about failed and refused binds."""
_ADVICE_BY_CODE = {failure.value: advice for failure, advice in ADVICE.items()}


@dataclass(frozen=True)
class Alert:
    """Something that needs an operator, as one line: its tone, a label, the text of the link (`link_text`), the rest of
    the sentence (`explanation`), and the link's address. `manual_place` is the part of the manual that says what to do,
    '' if the sentence says all of it.
    """

    tone: Tone
    label: str
    link_text: str
    explanation: str
    url: str
    manual_place: str = ""


@dataclass(frozen=True)
class SystemState:
    """All numbers from which `list_alerts` makes its list.

    `agents_by_state`: number of agents by liveness; it must have the key `down`. `devices_by_state`: number of devices
    by state. `failing_drivers` and `skipped_hardware`: how many there are on all hosts.
    """

    agents_by_state: Mapping[str, int]
    devices_by_state: Counter[str]
    backlog: Backlog
    resource_classes: Sequence[RenderableCapacity]
    failing_drivers: int
    skipped_hardware: int
    now: datetime


def list_alerts(system_state: SystemState) -> list[Alert]:
    """Return what needs an operator: first what is bad, then warnings, then what only waits for a decision."""
    alerts = [
        *_device_alerts(system_state),
        *_host_alerts(system_state),
        *_cloud_alerts(system_state),
        *_bind_alerts(system_state),
        *_worker_alerts(system_state),
        *_neighbour_alerts(system_state),
        *_audit_alerts(system_state),
        *_capacity_alerts(system_state),
    ]
    return sorted(alerts, key=lambda need: ("bad", "warn", "calm").index(need.tone))


def _device_alerts(system_state: SystemState) -> Iterator[Alert]:
    """Yield alerts about missing, failed, broken, quarantined, degraded and undecided devices, and about contradictions
    with Placement and Nova.
    """
    work, by_state = system_state.backlog, system_state.devices_by_state
    if n := work.missing_held:
        lost = "still held by instances: repair the host first, then the instances."
        yield Alert("bad", "missing", count_noun(n, "device"), lost, list_url("device", state__exact="missing"))
    if n := work.discrepancies:
        says = "between this service, Placement and Nova; each of them says what to do."
        url = reverse("admin:placement_sync_discrepancy_changelist")
        yield Alert("bad", "differs", count_noun(n, "contradiction"), says, url)
    if n := by_state["failed"]:
        why = "failed: read the reason, then enable or retire."
        yield Alert("bad", "failed", count_noun(n, "device"), why, list_url("device", state__exact="failed"))
    if n := work.broken:
        broken = (
            "whose health is failed: free units are not offered. Read the reason, then reset, or drain and replace."
        )
        yield Alert("bad", "broken", count_noun(n, "device"), broken, list_url("device", status__exact="failed"))
    if n := by_state["quarantined"]:
        why = "quarantined: read the reason, then release or retire."
        url = list_url("device", state__exact="quarantined")
        yield Alert("warn", "quarantined", count_noun(n, "device"), why, url)
    if n := work.degraded:
        degraded = "degraded, as the driver reports: plan an inspection."
        yield Alert("warn", "degraded", count_noun(n, "device"), degraded, list_url("device", status__exact="degraded"))
    if n := by_state["missing"] - work.missing_held:
        gone = "no longer reported by the driver: put back, or retire."
        yield Alert("warn", "missing", count_noun(n, "device"), gone, list_url("device", state__exact="missing"))
    if n := by_state["inactive"]:
        decide = "waiting for a decision: enable, or write an admission rule."
        yield Alert("calm", "new", count_noun(n, "device"), decide, list_url("device", state__exact="inactive"))


def _host_alerts(system_state: SystemState) -> Iterator[Alert]:
    """Yield alerts about agents that are down, failing drivers and skipped hardware."""
    if n := system_state.agents_by_state["down"]:
        silent = "down, so the data shown of the host is old: start cyborg-agent there."
        yield Alert(
            "bad", "down", count_noun(n, "agent"), silent, f"{reverse('admin:agents_agent_changelist')}?is=down"
        )
    if n := system_state.failing_drivers:
        answer = "failing: the reasons are listed below."
        yield Alert("bad", "failing", count_noun(n, "driver"), answer, "#failing")
    if n := system_state.skipped_hardware:
        taken = "skipped by drivers: the reasons are listed below."
        yield Alert("warn", "faults", count_noun(n, "piece of hardware", "pieces of hardware"), taken, "#faults")


def _cloud_alerts(system_state: SystemState) -> Iterator[Alert]:
    """Yield an alert about instances that a Nova does not know whose answer is not believed, an alert about stuck
    intents of any kind, and an alert for Placement and for Nova if it is behind by more
    than MAX_CLOUD_DELAY and none of its own intents is stuck. A service without a handler in this process is left out.
    """
    work = system_state.backlog
    if n := work.unknown_to_nova:
        doubt = (
            "that hold requests, and for every other one so far. It may be the Nova of another region, so nothing is"
            " freed. Check the region and CYBORG_NOVA_ENDPOINT, or confirm the address."
        )
        url = reverse("admin:placement_sync_novaendpoint_changelist")
        yield Alert("bad", "not proven", f"Nova answers 404 for {count_noun(n, 'instance')}", doubt, url)
    if n := work.stuck_intents:
        error = next((one.error for one in work.intents.values() if one.stuck and one.error), "")
        failed = _append_error("failed ten times or more", error)
        yield Alert("bad", "stuck", count_noun(n, "intent"), failed, list_url("intent", stuck="yes"))
    trees_url, notices_url = (
        reverse("admin:placement_sync_tree_changelist") + "?is=behind",
        list_url("intent", kind="notice"),
    )
    for name, kind, backlog_of_service, url in (
        ("Placement", "provider", work.placement_intents, trees_url),
        ("Nova", "notice", work.nova_intents, notices_url),
    ):
        if (
            jobs.has_handler(kind)
            and not backlog_of_service.stuck
            and backlog_of_service.oldest
            and system_state.now - backlog_of_service.oldest > MAX_CLOUD_DELAY
        ):
            delay = format_duration(backlog_of_service.oldest, system_state.now)
            behind = f"is behind by {delay}, {count_noun(backlog_of_service.number, 'change')} waiting"
            yield Alert("warn", "behind", name, _append_error(behind, backlog_of_service.error), url)


def _worker_alerts(system_state: SystemState) -> Iterator[Alert]:
    """Yield alerts about binds near or past their deadline, about reports and jobs that have waited for more than
    `MAX_WORKER_DELAY`, about clients that were refused, and about a mail server that sends nothing.
    """
    work, binding_url = system_state.backlog, list_url("acceleratorrequest", state__exact="BindStarted")
    if n := work.overdue:
        late = "past the deadline of the bind, and still not ended: check whether the workers run."
        yield Alert("bad", "stuck", count_noun(n, "request"), late, binding_url)
    if n := work.near - work.overdue:
        soon = f"less than {NEAR_DEADLINE_S} s before the deadline of the bind: the host answers slowly."
        yield Alert("warn", "late", count_noun(n, "request"), soon, binding_url)
    if work.spool_oldest and system_state.now - work.spool_oldest > MAX_WORKER_DELAY:
        oldest_wait = format_duration(work.spool_oldest, system_state.now)
        waits = f"not merged, the oldest for {oldest_wait}: check the cluster “ingest”."
        yield Alert("bad", "waiting", count_noun(work.spool, "report"), waits, list_url("host"))
    if work.tick_oldest and system_state.now - work.tick_oldest > MAX_WORKER_DELAY:
        asleep = (
            f"have started no job for {format_duration(work.tick_oldest, system_state.now)}: start the clusters again."
        )
        yield Alert("bad", "asleep", "The workers", asleep, list_url("intent"))
    if work.refused_clients:
        refused = _append_error(
            "were refused, because they sent more than their share to a busy process", work.refused_clients
        )
        url = list_url("event", q=f"action:{REFUSED_CLIENTS_ACTION}")
        yield Alert("warn", "busy", "Clients", refused, url)
    if work.mail_error:
        unsent = _append_error("sends no mail now, so mails wait: check the CYBORG_MAIL_… keys", work.mail_error)
        url = reverse("admin:cyborgweb_delivery_changelist") + "?progress__exact=waiting"
        yield Alert("warn", "mail", "The mail server", unsent, url)


def _bind_alerts(system_state: SystemState) -> Iterator[Alert]:
    """Yield an alert for each reason for which binds on one host failed repeatedly, or binds were refused repeatedly,
    with advice.
    """
    for failed in system_state.backlog.failed_binds:
        if failed.is_refused:
            verb, query = "were refused without a change", f"action:{refused_binds.ACTION}"
        else:
            verb, query = f"failed on {failed.host}", f"action:{BIND_FAILED_ACTION} host:{failed.host}"
        text = failed.text.rstrip(".")
        text = text if len(text) <= MAX_ERROR_LENGTH else f"{text[:MAX_ERROR_LENGTH]}…"
        newest = f"instance {failed.instance}, host {failed.host}, provider {failed.provider}"
        advice = _ADVICE_BY_CODE.get(failed.failure, "")
        why = (
            f"{verb} within {FAILED_BINDS_MINUTES} minutes ({failed.failure}), the last ({newest}) because:"
            f" {text}. {advice}"
        )
        yield Alert("bad", "binds", count_noun(failed.number, "bind"), why, list_url("event", q=query), BINDS_PLACE)


def _neighbour_alerts(system_state: SystemState) -> Iterator[Alert]:
    """Yield an alert for each service or client that was slow lately, and one for the database."""
    url = list_url("event", q=f"action:{slow_neighbours.ACTION}")
    for name, what in system_state.backlog.slow_neighbours:
        yield Alert("warn", "slow", name, what, url)


def _audit_alerts(system_state: SystemState) -> Iterator[Alert]:
    """Yield alerts about events that do not match their seals, a refusal to seal events, and a recent restore."""
    audit = system_state.backlog.audit
    if audit and audit.findings:
        differs = _append_error("between events and their seals: run manage.py verify_events", audit.finding)
        yield Alert("bad", "audit", count_noun(audit.findings, "difference"), differs, list_url("event"))
    if audit and audit.refusal:
        since = f" for {format_duration(audit.refused_since, system_state.now)}" if audit.refused_since else ""
        yield Alert("bad", "audit", "Events", _append_error(f"are not sealed{since}", audit.refusal), list_url("event"))
    if audit and audit.restored_at and system_state.now - audit.restored_at < SHOW_RESTORE_FOR:
        url = list_url("event", q="action:database.restored")
        yield Alert("warn", "audit", "A restore", _append_error("is recorded by a seal", audit.restore), url)


def _capacity_alerts(system_state: SystemState) -> Iterator[Alert]:
    """Yield an alert for each resource class of which units are held and none is free."""
    for resource_class in system_state.resource_classes:
        if resource_class.name and not resource_class.free and resource_class.held:
            out = f"{resource_class.held} held, {resource_class.reserved} not offered"
            yield Alert(
                "warn",
                "full",
                resource_class.name,
                f"has no free unit: {out}.",
                list_url("device", state__exact="ready"),
            )


def list_url(model: str, **filters: str) -> str:
    """Return the address of the console's list of a model of the `accelerators` app, such as `device`, with `filters`
    as its query.
    """
    url = reverse(f"admin:accelerators_{model}_changelist")
    return f"{url}?{urlencode(filters)}" if filters else url


def count_noun(number: int, singular: str, plural: str = "") -> str:
    """Return the number with the noun in its singular or plural: `1 device`, `2 devices`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _append_error(text: str, error: str) -> str:
    """Return the text, a colon and the error, which is cut to MAX_ERROR_LENGTH characters; without an error, the text
    and a full stop.
    """
    return f"{text}: {error[:MAX_ERROR_LENGTH]}{'…' if len(error) > MAX_ERROR_LENGTH else ''}" if error else f"{text}."
