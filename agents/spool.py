"""Read the spool host by host: take a turn of each host, and keep of its reports only those that can matter.

A host has one turn in a batch. If its newest report answers everything, all its older reports are deleted unread.
Otherwise the turn has the host's oldest reports, up to a number of bytes. So the cost of a batch does not depend on how
many reports a host has sent, and no host waits for the reports of another one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from django.db import connection

from accelerators.domain.diff import HostReport, find_open_drivers
from agents import wire

TURN_BYTES = 1024 * 1024
"""A turn with several reports of a host takes no further report once their payloads have reached this size."""
FRONT_REPORTS_PER_HOST = 4
"""For a batch of n hosts, the n × FRONT_REPORTS_PER_HOST oldest reports are searched for hosts."""
SELECT_NEWEST_REPORTS = """
WITH front AS (
       SELECT id, host_id FROM spool WHERE host_id <> ALL(%(excluded)s) {and_urgent} ORDER BY id LIMIT %(front)s),
     hosts AS (SELECT host_id, min(id) AS oldest FROM front GROUP BY host_id ORDER BY oldest LIMIT %(hosts)s),
     newest AS (
       SELECT h.oldest, n.*, sum(n.size) OVER (ORDER BY h.oldest) - n.size AS before
       FROM hosts h CROSS JOIN LATERAL (
         SELECT s.id, octet_length(s.payload) AS size FROM spool s WHERE s.host_id = h.host_id
         ORDER BY s.epoch DESC, s.seq DESC, s.id DESC LIMIT 1) n)
SELECT s.host_id, s.epoch, s.seq, s.payload, EXISTS (SELECT FROM spool o WHERE o.host_id = s.host_id AND o.id <> s.id),
  (SELECT set_config('statement_timeout', %(statement_ms)s, true) || set_config('lock_timeout', %(lock_ms)s, true))
FROM newest n JOIN spool s ON s.id = n.id WHERE n.before < %(bytes)s ORDER BY n.oldest
"""
"""The newest report of each of the hosts that have waited longest, up to a number of hosts and of bytes, with a flag
that is true if the host has other reports. It also limits the time of the transaction's later statements. Plain SQL,
because only PostgreSQL can measure payloads without reading them."""
SELECT_NEWEST_OF_ALL = SELECT_NEWEST_REPORTS.format(and_urgent="")
SELECT_NEWEST_OF_URGENT = SELECT_NEWEST_REPORTS.format(
    and_urgent="AND host_id IN (SELECT host_id FROM spool WHERE urgent)"
)
"""The same for hosts with an urgent report."""
SELECT_OLDEST_REPORTS = """
WITH waiting AS (
       SELECT id, host_id, epoch, seq, octet_length(payload) AS size,
         sum(octet_length(payload)) OVER (PARTITION BY host_id ORDER BY epoch, seq, id) AS upto
       FROM spool WHERE host_id = ANY(%(hosts)s)),
     turns AS (
       SELECT *, sum(size) OVER (ORDER BY array_position(%(hosts)s, host_id), epoch, seq, id) - size AS before
       FROM waiting WHERE upto - size < %(turn_bytes)s)
SELECT s.host_id, s.epoch, s.seq, s.payload
FROM turns t JOIN spool s ON s.id = t.id WHERE t.before < %(bytes)s ORDER BY t.before, s.id
"""
"""The oldest reports of these hosts, oldest first: of each host up to a number of bytes, and of all in their order up
to another one."""
DELETE_REPORTS = """
DELETE FROM spool s USING unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS x(host_id, epoch, seq)
WHERE s.host_id = x.host_id AND (s.epoch, s.seq) <= (x.epoch, x.seq)
"""
"""Delete the reports of each host up to an (epoch, seq)."""

SELECT_NEWER_FIRST = """
WITH sized AS (
  SELECT id, sum(octet_length(payload)) OVER (ORDER BY epoch DESC, seq DESC, id DESC) - octet_length(payload) AS before
  FROM spool WHERE host_id = %(host)s AND (epoch, seq, id) < (%(epoch)s, %(seq)s, %(id)s))
SELECT s.id, s.host_id, s.epoch, s.seq, s.payload FROM sized z JOIN spool s ON s.id = z.id
WHERE z.before < %(bytes)s ORDER BY s.epoch DESC, s.seq DESC, s.id DESC
"""
"""The newest reports of a host before one of them, newest first, up to a number of bytes."""

DELETE_OLDER_REPORTS = """
DELETE FROM spool
WHERE host_id = %(host)s AND (id = ANY(%(ids)s) OR (epoch, seq, id) < (%(epoch)s, %(seq)s, %(id)s))
"""
SELECT_HOSTS_ABOVE = """
SELECT host_id FROM spool WHERE host_id = ANY(%s) GROUP BY host_id
HAVING count(*) > %s OR sum(octet_length(payload)) > %s
"""
MAX_BIGINT = 2**63 - 1

_decode_report = msgspec.json.Decoder(wire.Report).decode


class SpooledReport(NamedTuple):
    """A row of the spool."""

    host_id: int
    epoch: int
    seq: int
    payload: str


@dataclass(frozen=True)
class Turn:
    """The work of one batch for one host: merge `reports`, and delete all reports up to `last`, an (epoch, seq).

    `error` says why a report could not be decoded, '' if all could. `is_complete` is False if later reports of the host
    wait already.
    """

    host_id: int
    reports: Sequence[HostReport]
    last: tuple[int, int]
    error: str = ""
    is_complete: bool = True


def take_turns(
    *,
    max_hosts: int,
    max_bytes: int,
    urgent_only: bool,
    excluded: Collection[int] = (),
    statement_timeout_s: float = 0.0,
) -> list[Turn]:
    """Return the turns of the hosts whose oldest report has waited longest, up to these numbers of hosts and of bytes.

    `urgent_only` restricts this to hosts with an urgent report. Hosts in `excluded` are left out. At least one report
    is read if there is one. It costs one statement, and a second one if an older report of a host can matter; nothing
    is deleted. The caller must be the only one that reads the spool.

    A later statement of the transaction fails if it takes longer than `statement_timeout_s` (0: never), or waits for a
    lock for more than a third of it: a wait says nothing about the reports.
    """
    statement = SELECT_NEWEST_OF_URGENT if urgent_only else SELECT_NEWEST_OF_ALL
    limits: dict[str, Any] = {"hosts": max_hosts, "front": max_hosts * FRONT_REPORTS_PER_HOST, "bytes": max_bytes}
    statement_ms = int(statement_timeout_s * 1000)
    limits |= {"statement_ms": str(statement_ms), "lock_ms": str(statement_ms // 3), "excluded": list(excluded)}
    turns: list[Turn] = []
    newest: dict[int, tuple[int, int]] = {}
    with connection.cursor() as cursor:
        cursor.execute(statement, limits)
        for *columns, has_older, _ in cursor.fetchall():
            row = SpooledReport(*columns)
            turn = build_turn([row])
            if has_older and (turn.error or find_open_drivers(turn.reports[0].drivers)):
                newest[row.host_id] = turn.last
            else:
                turns.append(turn)
        if newest:
            limits |= {"turn_bytes": min(TURN_BYTES, max_bytes)}
            cursor.execute(SELECT_OLDEST_REPORTS, limits | {"hosts": list(newest)})
            rows = [SpooledReport(*columns) for columns in cursor.fetchall()]
            for host_id, reports in groupby(rows, attrgetter("host_id")):
                turns.append(build_turn(list(reports), newest[host_id]))
    return turns


def build_turn(rows: Sequence[SpooledReport], newest: tuple[int, int] = (0, 0)) -> Turn:
    """Build the turn of one host from its reports, oldest first; `newest` is the (epoch, seq) of its newest report.

    The reports are decoded from the newest one on. A driver is complete as soon as a decoded report has an answer of it
    that replaces all its earlier answers. Decoding ends when all drivers of the newest report are complete, and the
    older reports are left out. Left out, too, are reports that this release cannot decode, and reports in which no
    driver answers that is not complete yet.
    """
    folding = ReportFolding()
    for row in reversed(rows):
        folding.add_older(row)
        if folding.is_complete:
            break
    last = rows[-1].epoch, rows[-1].seq
    return Turn(rows[-1].host_id, folding.reports[::-1], last, folding.error, last >= newest)


class ReportFolding:
    """Goes through the reports of one host from the newest one on, and keeps those that can matter in `reports`.

    `error` says why a report could not be decoded, '' if all could.
    """

    def __init__(self) -> None:
        self.reports: list[HostReport] = []
        self.error = ""
        self._open_drivers: set[str] | None = None
        """The drivers of the newest report of which an earlier answer can matter; None before there is a report."""

    @property
    def is_complete(self) -> bool:
        """Whether no older report can matter."""
        return self._open_drivers is not None and not self._open_drivers

    def add_older(self, row: SpooledReport) -> bool:
        """Take the next older report; return whether it can matter, or cannot be decoded."""
        try:
            decoded = _decode_report(row.payload)
        except msgspec.DecodeError as problem:  # it was spooled by another release
            self.error = str(problem)
            return True
        report = HostReport(row.epoch, row.seq, decoded.hash, decoded.all_drivers, decoded.boot_id)
        if self._open_drivers is not None and not any(
            one.driver in self._open_drivers and not one.error for one in report.drivers
        ):
            return False  # an error is replaced by what the newest report says of the driver
        self.reports.append(report)
        self._open_drivers = find_open_drivers(report.drivers, self._open_drivers)
        return True


def list_hosts_above(host_ids: Collection[int], max_reports: int, max_bytes: int) -> list[int]:
    """Return those of these hosts with more reports, or more bytes of reports, in the spool. No statement for none."""
    if not host_ids:
        return []
    with connection.cursor() as cursor:
        cursor.execute(SELECT_HOSTS_ABOVE, [list(host_ids), max_reports, max_bytes])
        return [host_id for (host_id,) in cursor.fetchall()]


def fold_reports(host_id: int) -> None:
    """Delete those of a host's reports whose content later reports replace completely, without merging the others.

    At most TURN_BYTES, and one report, are in memory at the same time. The caller must be the only one that reads the
    spool.
    """
    folding, position = ReportFolding(), {"epoch": MAX_BIGINT, "seq": MAX_BIGINT, "id": MAX_BIGINT}
    with connection.cursor() as cursor:
        while not folding.is_complete:
            cursor.execute(SELECT_NEWER_FIRST, position | {"host": host_id, "bytes": TURN_BYTES})
            rows = cursor.fetchall()
            if not rows:
                return
            needless: list[int] = []
            for row_id, *columns in rows:
                row = SpooledReport(*columns)
                if folding.is_complete or not folding.add_older(row):
                    needless.append(row_id)
            folding.reports.clear()
            position = {"epoch": row.epoch, "seq": row.seq, "id": row_id}
            if folding.is_complete:
                cursor.execute(DELETE_OLDER_REPORTS, position | {"host": host_id, "ids": needless})
            elif needless:
                cursor.execute("DELETE FROM spool WHERE id = ANY(%s)", [needless])


def delete_reports(turns: Iterable[Turn]) -> None:
    """Delete the reports of these turns from the spool, in one statement. The caller's transaction must merge them."""
    columns = zip(*((turn.host_id, *turn.last) for turn in turns), strict=True)
    with connection.cursor() as cursor:
        cursor.execute(DELETE_REPORTS, [list(column) for column in columns])
