"""The job `instances`: delete the requests of instances that do not exist any more.

Observed with a real Nova: a server that is deleted while it is being bound leaves its requests behind. An instance
counts as deleted only if Nova listed it as deleted or answered 404 for it, answers 404 again at least CONFIRM_AFTER_S
later, and is trusted at this address (`nova.endpoints`). An address that suddenly knows none of the instances may be
another Nova, or one whose database was emptied; then it is not trusted any more.

Each run costs a short listing of what was deleted since the last one, and at most MAX_LOOKUPS look-ups: of instances
that the listing named, and of all others in turn. The turn finds what Nova has purged from its tables, and what was
deleted while nobody listed; it is also what proves an address.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.db.models.functions import Now

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.states import EventSource
from accelerators.models import AcceleratorRequest
from accelerators.requests import binding
from accelerators.runtime import database_clock, jobs
from placement_sync.cloud import get_cloud_session
from placement_sync.models import Look, NovaEndpoint, Vanished
from placement_sync.nova import client, endpoints
from placement_sync.nova.client import NovaServer, NovaUnavailableError
from placement_sync.nova.endpoints import JOB

log = logging.getLogger(__name__)

INTERVAL_S = 60.0
"""Minimum time in seconds between two runs."""
CONFIRM_AFTER_S = 60.0
"""Minimum time in seconds between the first sign that an instance was deleted and the 404 that confirms it."""
MIN_UNCHANGED_S = 60.0
"""A request is compared with Nova once it has not changed for this many seconds."""
LISTING_DEADLINE_S, LOOKUP_DEADLINE_S = 15.0, 15.0
"""Seconds for all pages of the listing in one run, and for all look-ups: together half of the workers' time-out."""
MAX_LOOKUPS, MAX_SUSPECT_LOOKUPS = 32, 24
"""Look-ups per run, and how many of them may be of suspects, so that the turn of the others goes on."""
MIN_FOREIGN_CLOUD = 4
"""An address loses its trust if it shows no instance in a run, and this many are unknown that it did not list."""
OVERLAP = timedelta(minutes=5)
"""How far a listing goes back behind the answer to the one before: a deletion is committed later than it is dated."""
FIRST_WINDOW = timedelta(hours=1)
"""How far the first listing at an address goes back. The turn finds older deletions."""
JOB_CALLER = Caller("instances", "", frozenset({"admin", "service"}), "", service=True)


def run() -> None:
    """Run the job `instances`: make one comparison with Nova, if it is due."""
    jobs.run_steps_outside_transaction(JOB, step)


def step() -> bool:
    """Compare the instances that hold requests with Nova, at most every INTERVAL_S.

    Delete the requests of those that are certainly gone. If the address of Nova is not trusted, or Nova does not answer
    usably, nothing is deleted and a warning is logged. Does nothing if Nova is switched off or no cloud is configured.
    Takes at most LISTING_DEADLINE_S and LOOKUP_DEADLINE_S for its calls, and makes none inside a transaction. Always
    returns False: there is never more.
    """
    if Look.objects.filter(job=JOB, at__gt=Now() - timedelta(seconds=INTERVAL_S)).exists():
        return False
    if (cloud := get_cloud_session(settings.KEYS.nova_endpoint)) is None:
        return False
    Look.objects.update_or_create(job=JOB, defaults={"at": Now()})
    try:
        _compare_instances(cloud, settings.KEYS.nova_endpoint)
    except NovaUnavailableError as error:
        log.warning("The instances that hold accelerators could not be compared with Nova: %s", error)
    return False


def _compare_instances(cloud: Any, endpoint: str) -> None:
    """Read the listing of deleted instances, look instances up, and delete the requests of those that are gone.

    Raises NovaUnavailableError if the listing could not be read, or an instance could not be looked up, or the address
    is not trusted although Nova does not know an instance. The conclusions from the other answers are carried out
    before. If the listing could not be read, only instances that Nova shows count, and prove the address: 404 means
    nothing then.
    """
    listing_end = time.monotonic() + LISTING_DEADLINE_S
    url = endpoints.resolve_url(cloud, endpoint, LISTING_DEADLINE_S)
    row = endpoints.load_endpoint(url)
    holding = _load_holding_instances()
    Vanished.objects.exclude(instance__in=holding, endpoint=row).delete()
    endpoints.record_unknown_instances(row)
    if not holding:
        return
    listing_error = None
    try:
        _read_listing(cloud, endpoint, row, holding, listing_end)
    except NovaUnavailableError as error:
        listing_error = error
    can_conclude = row.is_trusted and not listing_error
    suspects = _load_suspects(row) if can_conclude else []
    turn = select_turn(holding, _load_vanished() if can_conclude else (), row.looked_up_to, MAX_LOOKUPS - len(suspects))
    answers = client.get_servers(cloud, endpoint, [*suspects, *turn], LOOKUP_DEADLINE_S)
    if turn:  # before the answers are applied: an address that is not trusted ends that with an error
        NovaEndpoint.objects.filter(pk=row.pk).update(looked_up_to=turn[-1])
    if listing_error:
        answers = {uuid: answer for uuid, answer in answers.items() if answer is not None}
    _apply_answers(row, answers, suspects)
    if listing_error:
        raise listing_error
    if unusable := [answer for answer in answers.values() if isinstance(answer, NovaUnavailableError)]:
        raise unusable[0]


def _load_holding_instances() -> set[str]:
    """Return the instances that hold a request which has not changed for MIN_UNCHANGED_S."""
    unchanged = AcceleratorRequest.objects.filter(
        instance_uuid__isnull=False, updated_at__lt=Now() - timedelta(seconds=MIN_UNCHANGED_S)
    )
    return {str(uuid) for uuid in unchanged.order_by().values_list("instance_uuid", flat=True).distinct()}


def _load_vanished() -> set[str]:
    """Return all instances that are suspected to be deleted."""
    return {str(uuid) for uuid in Vanished.objects.values_list("instance", flat=True)}


def _load_suspects(row: NovaEndpoint) -> list[str]:
    """Return the suspects of this address that a 404 would confirm now, the longest suspected first, at most
    MAX_SUSPECT_LOOKUPS."""
    due = Vanished.objects.filter(endpoint=row, since__lte=Now() - timedelta(seconds=CONFIRM_AFTER_S))
    return [str(uuid) for uuid in due.order_by("since").values_list("instance", flat=True)[:MAX_SUSPECT_LOOKUPS]]


def select_turn(holding: Collection[str], excluded: Collection[str], after: object, limit: int) -> list[str]:
    """Return the next instances to look up in turn, at most `limit`: by uuid, those behind `after` first. This is a
    pure function.

    `after` is the last one of the turn before, or None. Those in `excluded` are left out.
    """
    waiting = sorted(set(holding) - set(excluded))
    behind = [uuid for uuid in waiting if after is None or uuid > str(after)]
    return [*behind, *waiting[: len(waiting) - len(behind)]][:limit]


def _read_listing(cloud: Any, endpoint: str, row: NovaEndpoint, holding: Collection[str], end: float) -> None:
    """Read the pages of what was deleted since the mark, and store the suspects and how far it was read.

    Each page is stored, so that the next run, also of another process, continues behind it. When the last page is read,
    the mark moves to the time of the answer to the first page, by Nova's clock, less OVERLAP. A listing that names
    one of the instances does not prove the address: other rules apply to it than to the look-ups. Raises
    NovaUnavailableError if a page is unusable or `end` (of `time.monotonic`) is reached before the first page is read.
    """
    since = row.changes_since = row.changes_since or database_clock.now() - FIRST_WINDOW
    has_more = True
    while has_more:
        remaining_s = max(0.0, end - time.monotonic())
        call = partial(client.list_deleted_instances, cloud, endpoint, since, row.page_marker, max(0.1, remaining_s))
        try:
            page = client.call_with_deadline(call, remaining_s)
        except client.InvalidMarkerError:
            row.page_marker, row.next_changes_since = "", None
            row.save(update_fields=["changes_since", "next_changes_since", "page_marker"])
            raise
        if named := set(holding).intersection(page.uuids):
            _suspect_instances(row, named)
            Vanished.objects.filter(instance__in=named, endpoint=row).update(listed=True)
        if not row.page_marker:
            row.next_changes_since = page.answered_at - OVERLAP if page.answered_at else row.changes_since
        if page.has_more:
            row.page_marker = page.uuids[-1]
        else:
            row.changes_since, row.next_changes_since, row.page_marker = row.next_changes_since, None, ""
        row.save(update_fields=["changes_since", "next_changes_since", "page_marker"])
        has_more = page.has_more and time.monotonic() < end


def _suspect_instances(row: NovaEndpoint, instances: Collection[str]) -> None:
    """Store that Nova at this address named these instances as deleted, or does not know them. Instances that are
    suspected already stay so.
    """
    Vanished.objects.bulk_create((Vanished(instance=uuid, endpoint=row) for uuid in instances), ignore_conflicts=True)


def _apply_answers(
    row: NovaEndpoint, answers: Mapping[str, NovaServer | NovaUnavailableError | None], suspects: Sequence[str]
) -> None:
    """Store what Nova's answers mean, and delete the requests of the suspects that it does not know.

    An instance that is found is no suspect any more, and proves the address; one that is unknown becomes a suspect. A
    suspect without usable answer has to wait again, so that the others get their turn. Raises UntrustedEndpointError if
    an instance is unknown and the address is not trusted, or not any more: then nothing is deleted.
    """
    found = {uuid for uuid, answer in answers.items() if isinstance(answer, NovaServer)}
    unknown = {uuid for uuid, answer in answers.items() if answer is None}
    if found:
        endpoints.record_proof(row)
        Vanished.objects.filter(instance__in=found).delete()
    Vanished.objects.filter(instance__in=set(suspects) - found - unknown).update(since=Now())
    _suspect_instances(row, unknown)
    if unknown and not found:
        _distrust_foreign_cloud(row)
    endpoints.record_unknown_instances(row)
    if unknown:
        endpoints.refuse_unless_trusted(row.url)
    for uuid in suspects:
        if uuid in unknown:
            _delete_requests(uuid, row.url)


def _distrust_foreign_cloud(row: NovaEndpoint) -> None:
    """Do not trust the address any more, if MIN_FOREIGN_CLOUD or more of the suspects were not listed as deleted.

    A confirmation after the first of their answers 404 keeps the trust. Called after a run in which Nova has shown no
    instance: without this, another Nova at a trusted address would take the devices of all running guests.
    """
    unlisted = list(Vanished.objects.filter(endpoint=row, listed=False).values_list("since", flat=True))
    if len(unlisted) >= MIN_FOREIGN_CLOUD:
        endpoints.distrust_endpoint(row, len(unlisted), min(unlisted))


def _delete_requests(instance: str, url: str) -> None:
    """Delete the instance's requests and release their handles, record the event `instance.vanished`, and delete the
    instance's `Vanished` row. Nothing is deleted if one of the requests changed less than MIN_UNCHANGED_S ago. A handle
    whose host may still run the guest is kept back (`releases`).

    Raises UntrustedEndpointError if the address is not trusted any more.
    """
    requests = AcceleratorRequest.objects.filter(instance_uuid=instance)
    with conductor.writing():
        endpoints.refuse_unless_trusted(url)  # its confirmation may have been withdrawn since
        names = [str(uuid) for uuid in requests.select_for_update().values_list("uuid", flat=True)]
        if not requests.filter(updated_at__gte=Now() - timedelta(seconds=MIN_UNCHANGED_S)).exists():
            reason = (
                f"instance {instance} was deleted: Nova at {url} named it as deleted or unknown, and then answered 404"
            )
            conductor.record_event(
                "instance.vanished",
                EventSource.SYSTEM,
                JOB,
                reason=f"{reason}; its deleted requests: {', '.join(names)}",
            )
            binding.delete_requests_of_instance(instance, JOB_CALLER)
    Vanished.objects.filter(instance=instance).delete()
