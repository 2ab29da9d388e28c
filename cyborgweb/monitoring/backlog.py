"""Count unfinished work and unhealthy devices: reports, intents, binds, commands, queues, devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
from django.db import connection

from accelerators import slow_neighbours
from accelerators.admin.events_and_intents import STUCK_AFTER
from accelerators.requests import refused_binds

NEAR_DEADLINE_S = 10
"""Seconds before its deadline from which a bind counts as close to failing."""
MAX_SLOW_NEIGHBOURS = 30
"""The number of slow neighbours that are listed."""
REFUSED_MINUTES = 10
"""Minutes for which the overview names clients that were refused."""
REFUSED_CLIENTS_HOST, REFUSED_CLIENTS_ACTION = "(clients)", "client.refused"
"""The host, so that an index finds them, and the action of events about refused clients."""
REFUSED_CLIENTS: dict[str, str | int] = {
    "clients": REFUSED_CLIENTS_HOST,
    "refused": REFUSED_CLIENTS_ACTION,
    "minutes": REFUSED_MINUTES,
}
FAILED_BINDS_MINUTES, MAX_FAILED_BINDS = 15, 10
"""Minutes for which failed and refused binds are counted, and the maximum number of entries that are listed."""
REPEATED_FAILURES = 3
"""The number of binds from which they are listed: those that failed for the same reason on the same host, or that were
refused for the same reason."""
BIND_FAILED_ACTION = "request.bind_failed"
SELECT_BACKLOG = """
SELECT json_build_object(
  'spool', (SELECT count(*) FROM spool), 'spool_oldest', (SELECT min(received_at) FROM spool),
  'tasks', (SELECT count(*) FROM django_q_ormq), 'tick_oldest', (SELECT min(at) FROM tick),
  'binding', (SELECT count(*) FROM accelerators_acceleratorrequest WHERE state = 'BindStarted'),
  'near', (SELECT count(*) FROM accelerators_acceleratorrequest
    WHERE state = 'BindStarted' AND deadline < now() + make_interval(secs => %(near)s)),
  'overdue', (SELECT count(*) FROM accelerators_acceleratorrequest WHERE state = 'BindStarted' AND deadline < now()),
  'commands', (SELECT count(*) FROM accelerators_command WHERE ended_at IS NULL),
  'draining', (SELECT count(*) FROM accelerators_device WHERE drain_to IS NOT NULL),
  'bulks', (SELECT count(*) FROM accelerators_bulk WHERE state = 'running'),
  'discrepancies', (SELECT count(*) FROM placement_sync_discrepancy),
  'unknown_to_nova', (SELECT coalesce(sum(unknown_instances), 0) FROM placement_sync_novaendpoint
    WHERE proven_at IS NULL AND confirmed_at IS NULL),
  'unsealed_oldest', (SELECT e.at FROM accelerators_event e WHERE (e.tx, e.id) > (
    coalesce((SELECT tx FROM accelerators_seal ORDER BY number DESC LIMIT 1), -1),
    coalesce((SELECT event FROM accelerators_seal ORDER BY number DESC LIMIT 1), 0)) ORDER BY e.tx, e.id LIMIT 1),
  'audit', (SELECT json_build_object('verified_at', max(verified_at), 'findings', max(findings),
    'finding', (array_agg(finding ORDER BY findings DESC, node))[1],
    'refusal', CASE WHEN coalesce(bool_or(refusal = '' AND sealed_at > now() - interval '10 minutes'), false) THEN ''
      ELSE coalesce((array_agg(refusal ORDER BY refused_since) FILTER (WHERE refusal <> ''))[1], '') END,
    'refused_since', min(refused_since), 'restored_at', max(restored_at), 'restore',
    (array_agg(restore ORDER BY restored_at DESC NULLS LAST))[1])
    FROM accelerators_auditstatus HAVING count(*) > 0),
  'degraded', (SELECT count(*) FROM accelerators_device WHERE status = 'degraded'),
  'broken', (SELECT count(*) FROM accelerators_device WHERE status = 'failed'),
  'devices', (SELECT coalesce(json_agg(json_build_array(state, type, n)), '[]') FROM (
    SELECT state, type, count(*) AS n FROM accelerators_device GROUP BY 1, 2) d),
  'missing_held', (SELECT count(*) FROM accelerators_device d WHERE d.state = 'missing' AND EXISTS (
    SELECT FROM accelerators_deployable p JOIN accelerators_acceleratorrequest r ON r.deployable_id = p.id
    WHERE p.device_id = d.id AND r.state IN ('BindStarted', 'Bound'))),
  'released', (SELECT count(*) FROM accelerators_releasedhandle),
  'unconfirmed', (SELECT count(*) FROM accelerators_releasedhandle w
    JOIN accelerators_attachhandle t ON t.id = w.handle_id WHERE w.ask_until IS NULL AND t.attach_type = 'PCI'),
  'refused_clients', coalesce((SELECT e.changes->'clients'->>1 FROM accelerators_event e
    WHERE e.host = %(clients)s AND e.action = %(refused)s AND e.at > now() - make_interval(mins => %(minutes)s)
    ORDER BY e.at DESC LIMIT 1), ''),
  'mail_error', coalesce((SELECT last_error FROM cyborgweb_mailserver WHERE retry_at > now()), ''),
  'slow_neighbours', (SELECT coalesce(json_agg(json_build_array(subject_name, reason)), '[]') FROM (
    SELECT DISTINCT ON (subject_name) subject_name, reason FROM accelerators_event
    WHERE host = %(neighbours)s AND at > now() - make_interval(secs => %(shown)s)
    ORDER BY subject_name, at DESC LIMIT %(most)s) s),
  'failed_binds', (SELECT coalesce(json_agg(json_build_object('failure', failure, 'is_refused', is_refused,
      'number', number, 'text', text, 'host', coalesce(newest->'hostname'->>1, host),
      'instance', coalesce(newest->'instance_uuid'->>1, ''), 'provider', coalesce(newest->'device_rp_uuid'->>1, ''))
      ORDER BY number DESC, host, failure), '[]') FROM (
    SELECT changes->'failure'->>1 AS failure, host, action = %(bind_refused)s AS is_refused,
      sum(coalesce((changes->'number'->>1)::bigint, 1)) AS number, (array_agg(reason ORDER BY at DESC))[1] AS text,
      (array_agg(changes ORDER BY at DESC))[1] AS newest
    FROM accelerators_event WHERE at > now() - make_interval(mins => %(failed_minutes)s)
      AND action IN (%(bind_failed)s, %(bind_refused)s) AND changes ? 'failure'
    GROUP BY 1, 2, 3 HAVING sum(coalesce((changes->'number'->>1)::bigint, 1)) >= %(repeated)s
    ORDER BY 4 DESC, 2, 1 LIMIT %(most_failed)s) f),
  'intents', (SELECT coalesce(json_object_agg(kind, i), '{}') FROM (
    SELECT kind, count(*) AS number, count(*) FILTER (WHERE attempts >= %(stuck)s) AS stuck, min(created_at) AS oldest,
      coalesce((array_agg(last_error ORDER BY attempts DESC) FILTER (WHERE last_error <> ''))[1], '') AS error
    FROM accelerators_intent GROUP BY kind) i))::text
"""
"""Plain SQL, because it reads many tables in one statement; the dashboard may run at most ten (promise P3)."""


@dataclass(frozen=True)
class IntentBacklog:
    """All open intents of one kind: their number, how many of them are stuck (`STUCK_AFTER` attempts or more), when the
    oldest was created, and the last error of the one with the most attempts.
    """

    number: int = 0
    stuck: int = 0
    oldest: datetime | None = None
    error: str = ""


@dataclass(frozen=True)
class FailedBinds:
    """Binds that failed for the same reason on one host, or that were refused for the same reason on any host, within
    the last FAILED_BINDS_MINUTES.

    `failure` is the reason as a code. `text`, `instance`, `host` and `provider` are those of the newest bind. With
    `is_refused`, nothing was changed.
    """

    failure: str
    is_refused: bool
    number: int
    text: str
    host: str
    instance: str
    provider: str


@dataclass(frozen=True)
class AuditState:
    """What the jobs that seal and verify events found on all nodes (`accelerators.models.AuditStatus`).

    `findings` and `finding` are those of the node with the most findings. `refusal` is '' if another node has sealed
    within the last ten minutes.
    """

    refusal: str = ""
    refused_since: datetime | None = None
    verified_at: datetime | None = None
    findings: int = 0
    finding: str = ""
    restored_at: datetime | None = None
    restore: str = ""


@dataclass(frozen=True)
class Backlog:
    """Numbers of everything that has begun and not ended, and of unhealthy devices.

    `spool`: reports not merged yet; `spool_oldest`: when the oldest arrived. `tasks`: tasks in the clusters' queues.
    `tick_oldest`: when the oldest wake-up of a job was requested. `binding`: binds under way; `near` of them have less
    than NEAR_DEADLINE_S seconds left, `overdue` are past their deadline and also counted as near. `commands`: commands
    that have not ended. `draining`: devices that drain. `bulks`: running bulk actions. `unknown_to_nova`: instances
    that hold requests and are unknown to a Nova whose answer is not believed. `unsealed_oldest`: when the oldest event
    was written that is not sealed yet. `degraded`, `broken`: devices whose reported health is `degraded`, or `failed`.
    `missing_held`: missing devices that a request holds. `released`: released handles that wait until their hosts
    confirm that no guest uses them; `unconfirmed`: those of them that were not confirmed in time, so that their devices
    were quarantined. `refused_clients`: the clients that were last refused because they used more than their share, ''
    if none was within REFUSED_MINUTES. `mail_error`: why no mail is sent now, '' if mail is sent. `intents` are by
    kind. A time is None if there is nothing.
    """

    spool: int
    spool_oldest: datetime | None
    tasks: int
    tick_oldest: datetime | None
    binding: int
    near: int
    overdue: int
    commands: int
    draining: int
    bulks: int
    discrepancies: int
    unknown_to_nova: int
    unsealed_oldest: datetime | None
    degraded: int
    broken: int
    missing_held: int
    released: int
    unconfirmed: int
    refused_clients: str = ""
    mail_error: str = ""
    slow_neighbours: list[tuple[str, str]] = field(default_factory=list)
    """Name of each slow neighbour, and what is slow (`accelerators.slow_neighbours`)."""
    failed_binds: list[FailedBinds] = field(default_factory=list)
    """Reasons with REPEATED_FAILURES or more failed or refused binds, those with the most first."""
    audit: AuditState | None = None
    """None if the jobs have not run yet."""
    intents: dict[str, IntentBacklog] = field(default_factory=dict)
    devices: list[tuple[str, str, int]] = field(default_factory=list)
    """State, type, and number of devices."""

    @property
    def placement_intents(self) -> IntentBacklog:
        """Intents to update Placement (kind `provider`); all numbers are 0 if there are none."""
        return self.intents.get("provider", IntentBacklog())

    @property
    def nova_intents(self) -> IntentBacklog:
        """Intents to notify Nova (kind `notice`); all numbers are 0 if there are none."""
        return self.intents.get("notice", IntentBacklog())

    @property
    def stuck_intents(self) -> int:
        """The number of intents, of all kinds, with `STUCK_AFTER` attempts or more."""
        return sum(one.stuck for one in self.intents.values())


def read_backlog() -> Backlog:
    """Read how much work is unfinished, and how many devices are unhealthy, in one statement. Nothing is locked."""
    with connection.cursor() as cursor:
        parameters = REFUSED_CLIENTS | {"near": NEAR_DEADLINE_S, "stuck": STUCK_AFTER}
        parameters |= {"neighbours": slow_neighbours.NEIGHBOURS, "most": MAX_SLOW_NEIGHBOURS}
        parameters |= {"failed_minutes": FAILED_BINDS_MINUTES, "bind_failed": BIND_FAILED_ACTION}
        parameters |= {"bind_refused": refused_binds.ACTION}
        parameters |= {"repeated": REPEATED_FAILURES, "most_failed": MAX_FAILED_BINDS}
        cursor.execute(SELECT_BACKLOG, parameters | {"shown": slow_neighbours.SHOWN_S})
        document: Any = cursor.fetchone()[0]
    return msgspec.json.decode(document, type=Backlog)
