"""Leases of agents: renew them in one statement every few seconds, and mark hosts with expired ones as stale."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from django.db import DataError, connection
from django.db.models.functions import Now

from accelerators import conductor
from accelerators.models import Host
from accelerators.runtime import database_clock, jobs
from agents import wire
from agents.gateway.row_locks import write_unless_locked
from agents.gateway.sessions import AgentSession
from agents.liveness import get_down_after

log = logging.getLogger(__name__)
UNTRIED_RETRY_S = 0.1
"""Seconds until the next flush if the last one had no time to try all hosts, because too many rows were locked."""
RETURN_FLUSH_S = 0.5
"""Minimum seconds between two flushes while agents return that were late or down. Agents that return between two
flushes share the second one."""
RowT = TypeVar("RowT")

UPSERT_LEASES = """
WITH own AS (
  SELECT url FROM agents_gateway WHERE url = %(url)s FOR UPDATE SKIP LOCKED
), here AS (
  UPDATE agents_gateway g SET name = %(name)s, seen_at = now() FROM own WHERE g.url = own.url
), new AS (
  INSERT INTO agents_gateway (name, url, seen_at) SELECT %(name)s, %(url)s, now()
  WHERE %(url)s::text <> '' AND NOT EXISTS (SELECT 1 FROM agents_gateway WHERE url = %(url)s) ON CONFLICT DO NOTHING
), gone AS (
  DELETE FROM agents_gateway WHERE url IN (SELECT url FROM agents_gateway
    WHERE seen_at < now() - interval '1 hour' AND url <> %(url)s FOR UPDATE SKIP LOCKED)
), expired AS (
  DELETE FROM agents_usednonce WHERE nonce IN (SELECT nonce FROM agents_usednonce
    WHERE used_at < now() - interval '10 minutes' LIMIT 10000 FOR UPDATE SKIP LOCKED)
)
INSERT INTO agents_lease AS l (host_id, seen_at, epoch)
SELECT host, clock_timestamp() - make_interval(secs => age), epoch
FROM unnest(%(hosts)s::bigint[], %(ages)s::float8[], %(epochs)s::bigint[]) AS x(host, age, epoch)
WHERE EXISTS (SELECT FROM accelerators_host h WHERE h.id = x.host)
ON CONFLICT (host_id) DO UPDATE SET seen_at = greatest(l.seen_at, excluded.seen_at),
  epoch = greatest(l.epoch, excluded.epoch)
"""
"""Renew leases, and register this gateway if it has an address. Gateways not seen for an hour are deleted, and
so are used nonces long after their challenges have expired. Rows of gateways and nonces that another transaction has
locked are skipped, and so are heartbeats of hosts that were removed.

Plain SQL, because it writes these tables in one round trip, and a lease may only move forward. The database's clock
dates the heartbeats: the clocks of several gateways may differ.
"""
UPDATE_AGENTS_FROM_HELLO = """
UPDATE agents_agent a SET version = x.version, ops = x.ops, writes = x.writes, wire = x.wire, boot_id = x.boot_id,
  fingerprint = x.fingerprint, newest_certificate = x.newest_certificate, epoch = x.epoch, address = x.address,
  connection = x.number, changed_at = now(),
  connected_at = CASE WHEN a.connection = x.number THEN a.connected_at ELSE now() END
FROM jsonb_to_recordset(%s::jsonb) AS x(host bigint, version text, ops text, writes text, wire text, boot_id text,
  fingerprint text, newest_certificate text, epoch bigint, address text, number bigint)
WHERE a.host_id = x.host AND a.connection <= x.number
"""
"""Store what agents sent in Hello. The row always describes the newest connection, whichever gateway holds it.

Plain SQL, because each of thousands of rows gets values of its own: `bulk_update` would write a CASE with a branch for
each.
"""


class LeaseBuffer:
    """Collects heartbeats and Hello messages until they are flushed.

    The event loop calls `note_heartbeat`, `note_hello` and `note_return`, the writer thread calls `flush`.
    `note_heartbeat` costs a dictionary write.
    """

    def __init__(self, flush_s: float) -> None:
        self.flush_s = flush_s
        self.gateway_name_and_url = ("", "")
        """This gateway's name and address. Without an address it is not registered: other processes do not ask it."""
        self.has_untried_hosts = False
        """Whether the last flush had no time to try all hosts, so that the next one comes after UNTRIED_RETRY_S."""
        self._returned_hosts: set[int] = set()
        """Hosts whose agents have returned and count as late or down until the next flush, which therefore comes after
        RETURN_FLUSH_S."""
        self._next_flush_at = self._flushed_at = 0.0
        self._renewals: dict[int, tuple[float, int]] = {}
        self._hello_data: dict[int, dict[str, object]] = {}
        self._locked_hosts: set[int] = set()
        """Hosts whose rows another transaction had locked at the last attempt to write each of them alone."""

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
            "fingerprint": session.fingerprint,
            "newest_certificate": said.newest_certificate,
            "epoch": session.epoch,
            "address": session.address,
            "number": identity.connection_number,
        }

    @property
    def has_returned_agents(self) -> bool:
        """Whether agents have returned that count as late or down until the next flush."""
        return bool(self._returned_hosts)

    def note_return(self, host_id: int) -> None:
        """Note that this host's agent has connected again, and that its stored lease says that it is late or down.

        What was noted about it before is written RETURN_FLUSH_S after the last flush at the earliest, and tried again
        after RETURN_FLUSH_S while its rows are locked: until then the console shows the agent as late or down, and
        refuses actions that need it.
        """
        self._returned_hosts.add(host_id)

    def flush(self) -> bool:
        """Write leases and Hello data, and return True. Return False, and write nothing, until `flush_s` has passed
        since the last time; if late or down agents have returned, until RETURN_FLUSH_S has passed.

        True also means that the job `leases` should run, which looks for silent agents and for returned ones. The data
        of hosts whose rows are locked is kept for the next call. If so many rows are locked that some hosts were not
        tried, the next flush is due after UNTRIED_RETRY_S. Raise database errors; then all data that was not written is
        kept.
        """
        due_at = self._next_flush_at
        if self.has_returned_agents:
            due_at = min(due_at, self._flushed_at + RETURN_FLUSH_S)
        if time.monotonic() < due_at:
            return False
        self._next_flush_at = due_at  # so that it stays due if the database raises an error
        # Before the data is taken, because the event loop may add hosts meanwhile.
        returned_hosts, self._returned_hosts = self._returned_hosts, set()
        renewals, self._renewals = self._renewals, {}
        hello_data, self._hello_data = self._hello_data, {}
        locked: set[int] = set()
        try:
            renewals = self._write_unlocked(renewals, self._write_leases, locked)
            hello_data = self._write_unlocked(hello_data, _write_hello_data, locked)
            self._locked_hosts = locked
        finally:
            self._renewals = renewals | self._renewals
            self._hello_data = hello_data | self._hello_data
            self._returned_hosts.update(returned_hosts.intersection([*renewals, *hello_data]))
        self.has_untried_hosts = not locked.issuperset([*renewals, *hello_data])
        pause_s = min(self.flush_s, UNTRIED_RETRY_S) if self.has_untried_hosts else self.flush_s
        self._flushed_at = time.monotonic()
        self._next_flush_at = self._flushed_at + pause_s
        database_clock.refresh()  # for the event loop, which sends no statements
        return True

    def _write_unlocked(
        self, rows: dict[int, RowT], write: Callable[[dict[int, RowT]], None], locked: set[int]
    ) -> dict[int, RowT]:
        """Write the rows of all hosts, except for hosts whose rows are locked; return those that were not written, and
        add those of them to `locked` that were locked when they were last tried.

        Hosts that were locked before are written separately, so that all others go into one statement, and only if no
        time was lacking for the others.
        """
        first = [host for host in rows if host not in self._locked_hosts]
        again = [host for host in rows if host in self._locked_hosts]
        untried, still_locked = write_unless_locked(first, lambda some: write({host: rows[host] for host in some}))
        if not untried:
            later, at_once = write_unless_locked(again, lambda some: write({host: rows[host] for host in some}))
            again = [*later, *at_once]
        locked.update(still_locked, again)
        return {host: rows[host] for host in [*untried, *again, *still_locked]}

    def _write_leases(self, renewals: dict[int, tuple[float, int]]) -> None:
        """Renew leases, and register this gateway if it has an address, in one statement."""
        now = time.monotonic()
        ages = [now - at for at, _ in renewals.values()]
        name, url = self.gateway_name_and_url
        epochs = [epoch for _, epoch in renewals.values()]
        renewed: dict[str, Any] = {"hosts": list(renewals), "ages": ages, "epochs": epochs}
        with connection.cursor() as cursor:
            cursor.execute(UPSERT_LEASES, {"name": name, "url": url} | renewed)


def _write_hello_data(hello_data: dict[int, dict[str, object]]) -> None:
    """Store what agents said in Hello, in one statement. Data that the database rejects is logged and lost."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(UPDATE_AGENTS_FROM_HELLO, [msgspec.json.encode(list(hello_data.values())).decode()])
    except DataError:
        log.exception("Hello data cannot be stored (agents: %d)", len(hello_data))


def mark_stale_hosts() -> bool:
    """Mark hosts as stale whose agents are down (`agents.liveness`); unmark those that were heard again.

    Each changed host gets an event. Hosts without an agent or a lease are never marked. Always return False: the job
    need not run again at once.
    """
    oldest_allowed = Now() - get_down_after()
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
