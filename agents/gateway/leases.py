"""Leases of agents: renew them in one statement every few seconds, and mark hosts with expired ones as stale."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import msgspec
from django.conf import settings
from django.db import DataError, connection
from django.db.models.functions import Now

from accelerators import conductor
from accelerators.models import Host
from accelerators.runtime import database_clock, jobs
from agents import wire
from agents.gateway.sessions import AgentSession

log = logging.getLogger(__name__)

UPSERT_LEASES = """
WITH here AS (
  INSERT INTO agents_gateway AS g (name, url, seen_at) SELECT %(name)s, %(url)s, now() WHERE %(url)s::text <> ''
  ON CONFLICT (url) DO UPDATE SET name = excluded.name, seen_at = excluded.seen_at
), gone AS (
  DELETE FROM agents_gateway WHERE seen_at < now() - interval '1 hour' AND url <> %(url)s
)
INSERT INTO agents_lease AS l (host_id, seen_at, epoch)
SELECT host, clock_timestamp() - make_interval(secs => age), epoch
FROM unnest(%(hosts)s::bigint[], %(ages)s::float8[], %(epochs)s::bigint[]) AS x(host, age, epoch)
ON CONFLICT (host_id) DO UPDATE SET seen_at = greatest(l.seen_at, excluded.seen_at),
  epoch = greatest(l.epoch, excluded.epoch)
"""
"""Renew leases, and register this gateway if it has an address. Gateways not seen for an hour are deleted.

Plain SQL, because it writes two tables in one round trip, and a lease may only move forward. The database's clock dates
the heartbeats: the clocks of several gateways may differ.
"""
UPDATE_AGENTS_FROM_HELLO = """
UPDATE agents_agent a SET version = x.version, ops = x.ops, writes = x.writes, wire = x.wire, boot_id = x.boot_id,
  epoch = x.epoch, address = x.address, connection = x.number, connected_at = now(), changed_at = now()
FROM jsonb_to_recordset(%s::jsonb) AS x(host bigint, version text, ops text, writes text, wire text, boot_id text,
  epoch bigint, address text, number bigint)
WHERE a.host_id = x.host AND a.connection <= x.number
"""
"""Store what agents sent in Hello. The row always describes the newest connection, whichever gateway holds it.

Plain SQL, because each of thousands of rows gets values of its own: `bulk_update` would write a CASE with a branch for
each.
"""


class LeaseBuffer:
    """Collects heartbeats and Hello messages until they are flushed.

    The event loop calls `note_heartbeat` and `note_hello`, the writer thread calls `flush`. `note_heartbeat` costs a
    dictionary write.
    """

    def __init__(self, flush_s: float) -> None:
        self.flush_s = flush_s
        self.gateway_name_and_url = ("", "")
        """This gateway's name and address. Without an address it is not registered: other processes do not ask it."""
        self._next_flush_at = 0.0
        self._renewals: dict[int, tuple[float, int]] = {}
        self._hello_data: dict[int, dict[str, object]] = {}

    def note_heartbeat(self, host_id: int, epoch: int) -> None:
        """Note that a message of this host's agent has arrived now, so that the next flush renews the lease.

        `epoch` is the agent's epoch; the lease keeps the highest one.
        """
        self._renewals[host_id] = (time.monotonic(), epoch)

    def note_hello(self, session: AgentSession, said: wire.Hello) -> None:
        """Note what an agent says about itself in Hello: version, commands, Placement writes, boot id, address.

        The next flush stores it in the agent's row. It replaces an earlier Hello of the host that is not flushed yet.
        """
        identity = session.identity
        self._hello_data[identity.host_id] = {
            "host": identity.host_id,
            "version": said.agent_version,
            "ops": " ".join(said.ops),
            "writes": said.writes and said.writes.replace("\0", ""),
            "wire": session.version,
            "boot_id": session.boot_id,
            "epoch": session.epoch,
            "address": session.address,
            "number": identity.connection_number,
        }

    def flush(self) -> bool:
        """Write leases and Hello data, and return True. Return False, and write nothing, until `flush_s` has passed
        since the last time.

        True also means that the job which looks for silent agents should run. Raise database errors; then everything is
        kept for the next call.
        """
        if time.monotonic() < self._next_flush_at:
            return False
        renewals, self._renewals = self._renewals, {}
        hello_data, self._hello_data = self._hello_data, {}
        try:
            self._write_to_database(renewals, hello_data)
        except Exception:
            self._renewals = renewals | self._renewals
            self._hello_data = hello_data | self._hello_data
            raise
        self._next_flush_at = time.monotonic() + self.flush_s
        database_clock.refresh()  # for the event loop, which sends no statements
        return True

    def _write_to_database(
        self, renewals: dict[int, tuple[float, int]], hello_data: dict[int, dict[str, object]]
    ) -> None:
        """Write leases and Hello data, one statement each, without a common transaction.

        The statement for leases also registers this gateway if it has an address; without leases it is not executed.
        Hello data that the database rejects is logged and lost. Raise other database errors.
        """
        with connection.cursor() as cursor:
            if renewals:
                now = time.monotonic()
                ages = [now - at for at, _ in renewals.values()]
                name, url = self.gateway_name_and_url
                epochs = [epoch for _, epoch in renewals.values()]
                renewed: dict[str, Any] = {"hosts": list(renewals), "ages": ages, "epochs": epochs}
                cursor.execute(UPSERT_LEASES, {"name": name, "url": url} | renewed)
            if hello_data:
                try:
                    cursor.execute(UPDATE_AGENTS_FROM_HELLO, [msgspec.json.encode(list(hello_data.values())).decode()])
                except DataError:  # bad Hello data must not prevent leases from being renewed
                    log.exception("Hello data cannot be stored (agents: %d)", len(hello_data))


def mark_stale_hosts() -> bool:
    """Mark hosts as stale whose lease is older than two heartbeats and 2 s; unmark those that were heard again.

    Each changed host gets an event. Hosts without an agent or a lease are never marked. Always return False: the job
    need not run again at once.
    """
    oldest_allowed = Now() - timedelta(seconds=2 * settings.KEYS.beat_s + 2)
    silent = Host.objects.filter(stale_since__isnull=True, agent__isnull=False, lease__seen_at__lt=oldest_allowed)
    heard = Host.objects.filter(stale_since__isnull=False, lease__seen_at__gte=oldest_allowed)
    if ids := list(silent.values_list("id", flat=True)):
        conductor.set_hosts_stale_since(ids, database_clock.now())
    if ids := list(heard.values_list("id", flat=True)):
        conductor.set_hosts_stale_since(ids, None)
    return False


def run_lease_job() -> None:
    """Run the job `leases`: mark hosts whose agents are silent as stale, and unmark those that were heard again."""
    jobs.run_steps("leases", mark_stale_hosts)
