"""The job `instances`: delete the requests of instances that do not exist any more.

Observed with a real Nova: a server that is deleted while it is being bound leaves its requests behind. An instance
counts as deleted only if two complete listings, at least LISTING_INTERVAL_S apart, lack it and Nova answers 404 to a
direct query. A listing that contains none of MIN_FOREIGN_CLOUD or more instances is taken for another cloud's and
ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.states import Source
from accelerators.models import AcceleratorRequest
from accelerators.requests import binding
from accelerators.runtime import jobs
from placement_sync.cloud import session
from placement_sync.models import Look, Vanished
from placement_sync.nova.client import NovaUnavailableError, get

log = logging.getLogger(__name__)

JOB = "instances"
APART_S = 60.0
"""Minimum time in seconds between two listings, and between the first listing that lacks an instance and its direct
query.
"""
PAGE, TIMEOUT_S = 1000, 10.0
MANY = 4
"""If this many or more instances hold requests and none of them is listed, the listing is taken for another cloud's."""
WATCHER = Caller("instances", "", frozenset({"admin", "service"}), "", service=True)
HELD = """
SELECT DISTINCT instance_uuid::text FROM accelerators_acceleratorrequest
WHERE instance_uuid IS NOT NULL AND updated_at < statement_timestamp() - interval '60 seconds'
"""
"""The instances that hold a request which has not changed for 60 s."""


def run() -> None:
    """Run the job."""
    jobs.run_outside_transaction(JOB, step)


def step() -> bool:
    """Compare the instances that hold requests with Nova, at most every LISTING_INTERVAL_S.

    Always returns False: there is never more.
    """
    with connection.cursor() as cursor:
        cursor.execute(HELD)
        held = {uuid for (uuid,) in cursor.fetchall()}
    known = {str(row.instance): row.since for row in Vanished.objects.all()}
    now = datetime.now(UTC)
    if not held or Look.objects.filter(job=JOB, at__gt=now - timedelta(seconds=APART_S)).exists():
        return False
    if (cloud := session(settings.KEYS.nova_endpoint)) is None:
        return False
    Look.objects.update_or_create(job=JOB, defaults={"at": now})
    nova = _Nova(cloud, settings.KEYS.nova_endpoint)
    try:
        listed = nova.listed()
        missing = _missing(held, listed)
        _forget(known.keys() - missing)
        Vanished.objects.bulk_create((Vanished(instance=uuid, since=now) for uuid in missing), ignore_conflicts=True)
        for uuid in sorted(gone(missing, known, now)):
            if nova.is_gone(uuid):
                _free(uuid)
    except NovaUnavailableError as error:
        log.warning("The instances that hold accelerators could not be compared with Nova: %s", error)
    return False


def gone(missing: Collection[str], known: Mapping[str, datetime], now: datetime) -> set[str]:
    """Return the missing instances that were first missed at least LISTING_INTERVAL_S ago."""
    before = now - timedelta(seconds=APART_S)
    return {uuid for uuid in missing if uuid in known and known[uuid] <= before}


def _missing(held: Collection[str], listed: Collection[str]) -> set[str]:
    """Return the instances that the listing lacks.

    Raises NovaUnavailableError if it lacks all of MIN_FOREIGN_CLOUD or more.
    """
    missing = set(held) - set(listed)
    if len(missing) == len(held) >= MANY:
        raise NovaUnavailableError(
            f"its listing has none of the {len(held)} instances that hold accelerators; check that it is the same cloud"
        )
    return missing


def _forget(instances: Collection[str]) -> None:
    Vanished.objects.filter(instance__in=list(instances)).delete()


def _free(instance: str) -> None:
    """Delete the instance's requests and record an event."""
    requests = AcceleratorRequest.objects.filter(instance_uuid=instance)
    with conductor.writing():
        names = ", ".join(str(uuid) for uuid in requests.values_list("uuid", flat=True))
        reason = f"instance {instance} was deleted: two of Nova's listings lacked it, and a query was answered with 404"
        conductor.record("instance.vanished", Source.SYSTEM, JOB, reason=f"{reason}; its deleted requests: {names}")
        binding.delete_of_instance(instance, WATCHER)
    _forget([instance])


class _Nova:
    """The two queries that the job sends to Nova, through a keystoneauth1 session."""

    def __init__(self, session: Any, endpoint: str) -> None:
        self._session, self._endpoint = session, endpoint

    def listed(self) -> set[str]:
        """Return the uuids of all instances of all projects.

        Raises NovaUnavailableError unless the listing is complete.
        """
        return {uuid for page in self._pages() for uuid in page}

    def _pages(self) -> Iterator[list[str]]:
        params = {"all_tenants": "1", "limit": str(PAGE)}
        while True:
            answer = self._get("/servers", params)
            if answer.status_code != 200:
                raise NovaUnavailableError(f"GET /servers: {answer.status_code}")
            try:
                found = [str(server["id"]) for server in answer.json()["servers"]]
                more = any(link.get("rel") == "next" for link in answer.json().get("servers_links", ()))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise NovaUnavailableError("GET /servers: the answer is not a list of servers") from None
            yield found
            if not more or not found:
                return
            params["marker"] = found[-1]

    def is_gone(self, uuid: str) -> bool:
        """Whether Nova answers 404 for this instance. Raises NovaUnavailableError if it does not answer."""
        return bool(self._get(f"/servers/{uuid}", {}).status_code == 404)

    def _get(self, path: str, params: Mapping[str, str]) -> Any:
        return get(self._session, self._endpoint, path, params, TIMEOUT_S)
