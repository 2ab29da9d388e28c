"""The job `instances`: delete the requests of instances that do not exist any more.

Observed with a real Nova: a server that is deleted while it is being bound leaves its requests behind. An instance
counts as deleted only if two complete listings, at least LISTING_INTERVAL_S apart, lack it and Nova answers 404 to a
direct query, all of them at the same address, and only if that address is trusted (`nova.endpoints`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models.functions import Now

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.states import EventSource
from accelerators.models import AcceleratorRequest
from accelerators.requests import binding
from accelerators.runtime import jobs
from placement_sync.cloud import get_cloud_session
from placement_sync.models import Look, Vanished
from placement_sync.nova import endpoints
from placement_sync.nova.client import NovaUnavailableError, send_get

log = logging.getLogger(__name__)

JOB = "instances"
LISTING_INTERVAL_S = 60.0
"""Minimum time in seconds between two listings, and between the first listing that lacks an instance and its direct
query.
"""
PAGE_SIZE, TIMEOUT_S = 1000, 10.0
JOB_CALLER = Caller("instances", "", frozenset({"admin", "service"}), "", service=True)
MIN_UNCHANGED_S = 60.0
"""A request is compared with Nova once it has not changed for this many seconds."""


def run() -> None:
    """Run the job `instances`: make one comparison with Nova, if it is due."""
    jobs.run_steps_outside_transaction(JOB, step)


def step() -> bool:
    """Compare the instances that hold requests with Nova, at most every LISTING_INTERVAL_S.

    Delete the requests of those that are certainly gone: this listing lacks them, one at least LISTING_INTERVAL_S ago
    lacked them, and Nova answers 404 for them. A listing with one of these instances proves the address. If it is not
    trusted, or Nova does not answer usably, nothing is deleted and a warning is logged. Does nothing if Nova is
    switched off or no cloud is configured. Always returns False: there is never more.
    """
    holding = _load_holding_instances()
    now = datetime.now(UTC)
    if not holding or Look.objects.filter(job=JOB, at__gt=now - timedelta(seconds=LISTING_INTERVAL_S)).exists():
        return False
    if (cloud := get_cloud_session(settings.KEYS.nova_endpoint)) is None:
        return False
    Look.objects.update_or_create(job=JOB, defaults={"at": now})
    nova = _NovaQueries(cloud, settings.KEYS.nova_endpoint)
    try:
        endpoint = endpoints.load_endpoint(endpoints.resolve_url(cloud, settings.KEYS.nova_endpoint))
        listed = nova.list_instances()
        missing = holding - listed
        if holding & listed:
            endpoints.record_proof(endpoint)
        else:
            endpoints.refuse_unless_trusted(endpoint.url)
        Vanished.objects.exclude(instance__in=missing, endpoint=endpoint).delete()
        missing_since = {str(row.instance): row.since for row in Vanished.objects.all()}
        Vanished.objects.bulk_create(
            (Vanished(instance=uuid, since=now, endpoint=endpoint) for uuid in missing), ignore_conflicts=True
        )
        for uuid in sorted(select_confirmed_missing(missing, missing_since, now)):
            if nova.is_gone(uuid):
                _delete_requests(uuid)
    except NovaUnavailableError as error:
        log.warning("The instances that hold accelerators could not be compared with Nova: %s", error)
    return False


def _load_holding_instances() -> set[str]:
    """Return the instances that hold a request which has not changed for MIN_UNCHANGED_S."""
    unchanged = AcceleratorRequest.objects.filter(
        instance_uuid__isnull=False, updated_at__lt=Now() - timedelta(seconds=MIN_UNCHANGED_S)
    )
    return {str(uuid) for uuid in unchanged.order_by().values_list("instance_uuid", flat=True).distinct()}


def select_confirmed_missing(
    missing: Collection[str], missing_since: Mapping[str, datetime], now: datetime
) -> set[str]:
    """Return those of the `missing` instances that were first missed at least LISTING_INTERVAL_S before `now`. Pure.

    `missing_since` holds the times at which earlier listings first lacked them.
    """
    missed_before = now - timedelta(seconds=LISTING_INTERVAL_S)
    return {uuid for uuid in missing if uuid in missing_since and missing_since[uuid] <= missed_before}


def _delete_vanished(instances: Collection[str]) -> None:
    """Delete the records (`Vanished`) that these instances were missing from Nova's listing."""
    Vanished.objects.filter(instance__in=list(instances)).delete()


def _delete_requests(instance: str) -> None:
    """Delete the instance's requests and release their handles, record the event `instance.vanished`, and delete the
    instance's `Vanished` row. A handle whose host may still run the guest is kept back (`releases`)."""
    requests = AcceleratorRequest.objects.filter(instance_uuid=instance)
    with conductor.writing():
        names = ", ".join(str(uuid) for uuid in requests.values_list("uuid", flat=True))
        reason = f"instance {instance} was deleted: two of Nova's listings lacked it, and a query was answered with 404"
        conductor.record_event(
            "instance.vanished", EventSource.SYSTEM, JOB, reason=f"{reason}; its deleted requests: {names}"
        )
        binding.delete_requests_of_instance(instance, JOB_CALLER)
    _delete_vanished([instance])


class _NovaQueries:
    """The two queries that the job sends to Nova, through a keystoneauth1 session."""

    def __init__(self, session: Any, endpoint: str) -> None:
        self._session, self._endpoint = session, endpoint

    def list_instances(self) -> set[str]:
        """Return the uuids of all instances of all projects.

        Raises NovaUnavailableError unless the listing is complete.
        """
        return {uuid for page in self._iterate_pages() for uuid in page}

    def _iterate_pages(self) -> Iterator[list[str]]:
        """Yield the uuids of each page of the listing. Raises NovaUnavailableError for an unusable answer."""
        params = {"all_tenants": "1", "limit": str(PAGE_SIZE)}
        while True:
            answer = self._get("/servers", params)
            if answer.status_code != 200:
                raise NovaUnavailableError(f"GET /servers: {answer.status_code}")
            try:
                uuids = [str(server["id"]) for server in answer.json()["servers"]]
                has_more = any(link.get("rel") == "next" for link in answer.json().get("servers_links", ()))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise NovaUnavailableError("GET /servers: the answer is not a list of servers") from None
            yield uuids
            if not has_more or not uuids:
                return
            params["marker"] = uuids[-1]

    def is_gone(self, uuid: str) -> bool:
        """Return True if Nova answers 404 for this instance, False for any other answer.

        Raises NovaUnavailableError if there is no answer.
        """
        return bool(self._get(f"/servers/{uuid}", {}).status_code == 404)

    def _get(self, path: str, params: Mapping[str, str]) -> Any:
        """Send a GET and return Nova's answer, whatever its status. Raises NovaUnavailableError if there is none."""
        return send_get(self._session, self._endpoint, path, params, TIMEOUT_S)
