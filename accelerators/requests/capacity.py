"""How many units there are, held, free and out of offer, and how busy what they are part of is: by groups.

Called by `cyborgweb.telemetry`, which brings what devices said last. Who held what, and when, is told by events;
what is counted here is now.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from django.db import connection

from accelerators.requests.binding_sql import FREE, IN_OFFER

MOST = 10_000
"""So many groups are given at once."""

COLUMNS = {
    "host": "h.name",
    "type": "d.type",
    "resource_class": "coalesce(a.value, '')",
    "project": "r.project_id",
}
"""What groups can be made by, and where it stands."""
ORDERS = {
    "group": 'k1 COLLATE "C", k2 COLLATE "C"',
    "-group": 'k1 COLLATE "C" DESC, k2 COLLATE "C" DESC',
    "largest": 'coalesce(total, held) DESC, k1 COLLATE "C", k2 COLLATE "C"',
}
_OF_ALL = f"""LEFT JOIN (SELECT deployable_id, count(*) AS held FROM accelerators_acceleratorrequest
  WHERE attach_handle_id IS NOT NULL GROUP BY 1) r ON r.deployable_id = p.id
  LEFT JOIN (SELECT t.deployable_id, count(*) AS free {FREE} AND (%(host{{n}})s::text IS NULL
    OR d.host_id = (SELECT id FROM accelerators_host WHERE name = %(host{{n}})s)) GROUP BY 1) f
    ON f.deployable_id = p.id"""
_FREE = IN_OFFER.format(free="coalesce(f.free, 0)", held="coalesce(r.held, 0)")
_OF_PROJECTS = """JOIN (SELECT deployable_id, project_id, count(*) AS held FROM accelerators_acceleratorrequest
  WHERE attach_handle_id IS NOT NULL AND (%(project{n})s::text IS NULL OR project_id = %(project{n})s)
  GROUP BY 1, 2) r ON r.deployable_id = p.id"""
_SAID = """said AS (
  SELECT * FROM unnest(%(hosts)s::bigint[], %(keys)s::text[], %(busy)s::float8[], %(used)s::float8[],
    %(size)s::float8[], %(power)s::float8[]) AS s(host, key, busy, used, size, power))"""
_LOAD = """count(*) AS devices, count(s.key) AS sampled, round(avg(busy)::numeric, 1)::float8 AS mean,
    round(max(busy)::numeric, 1)::float8 AS highest, sum(used) FILTER (WHERE size IS NOT NULL)::bigint AS used,
    sum(size) FILTER (WHERE used IS NOT NULL)::bigint AS size, round(sum(power)::numeric, 1)::float8 AS power"""
"""Of devices, of which some `said` something; memory is of those that give both numbers: used is part of all."""
_HOSTS = f"""
WITH {_SAID}
SELECT x.host_id, {_LOAD}
FROM accelerators_device x LEFT JOIN said s ON s.host = x.host_id AND s.key = x.key
WHERE x.host_id = ANY(%(asked)s::bigint[]) AND x.state <> 'retired' GROUP BY 1
"""
_GROUPS = """
SELECT {n} AS n, g.* FROM (
WITH part AS MATERIALIZED (
  SELECT {first}::text AS k1, {second}::text AS k2, d.host_id AS host, d.key, {total} AS total,
    coalesce(r.held, 0) AS held, {free} AS free
  FROM accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id AND d.state <> 'retired'
  JOIN accelerators_host h ON h.id = d.host_id
  LEFT JOIN accelerators_attribute a ON a.deployable_id = p.id AND a.key = 'rc'
  {holders}
  WHERE (%(host{n})s::text IS NULL OR h.name = %(host{n})s) AND (%(type{n})s::text IS NULL OR d.type = %(type{n})s)
    AND (%(resource_class{n})s::text IS NULL OR coalesce(a.value, '') = %(resource_class{n})s)),
{said},
units AS (
  SELECT k1, k2, sum(total)::bigint AS total, sum(held)::bigint AS held, sum(free)::bigint AS free,
    sum(greatest(total - held - free, 0))::bigint AS reserved
  FROM part GROUP BY 1, 2 HAVING sum(total) > 0 OR sum(held) > 0),
loads AS (
  SELECT k1, k2, {load}
  FROM (SELECT DISTINCT k1, k2, host, key FROM part) x LEFT JOIN said s USING (host, key) GROUP BY 1, 2)
SELECT row_number() OVER (ORDER BY {order}) AS place, k1, k2, total, held, free, reserved, devices, sampled, mean,
  highest, used, size, power
FROM units JOIN loads USING (k1, k2) {beyond} ORDER BY place LIMIT %(limit{n})s) g
"""


@dataclass(frozen=True, slots=True)
class Said:
    """What one device said last: percent, bytes, bytes, watts; None for what its driver has no number of."""

    host: int
    key: str
    busy: float | None
    used: float | None
    size: float | None
    power: float | None


@dataclass(frozen=True, slots=True)
class Load:
    """Of `devices`, `sampled` have said something lately; the numbers are of those that have one, else None.

    `mean` and `highest` are percent of utilisation, `used` and `size` bytes of memory of the devices
    that give both, `power` is watts.
    """

    devices: int = 0
    sampled: int = 0
    mean: float | None = None
    highest: float | None = None
    used: int | None = None
    size: int | None = None
    power: float | None = None


@dataclass(frozen=True)
class Group:
    """Units of one group. `free` is what a request can get now; `reserved` is neither held nor free, whatever is in the
    way. What a project holds has no total: `total` and `free` are None."""

    names: tuple[str, ...]
    total: int | None
    held: int
    free: int | None
    reserved: int
    load: Load = Load()

    @property
    def name(self) -> str:
        """Of the first thing that it was made by."""
        return self.names[0]


@dataclass(frozen=True)
class Asked:
    """Which groups: made by one or two of COLUMNS, of what fits the rest; `project` counts only where groups are made
    by project. `order` is one of ORDERS; `after`: only those beyond this one, in that order."""

    by: Sequence[str]
    host: str | None = None
    type: str | None = None
    resource_class: str | None = None
    project: str | None = None
    order: str = "group"
    after: tuple[str, ...] | None = None
    limit: int = MOST


def groups(asked: Sequence[Asked], said: Collection[Said] = ()) -> list[list[Group]]:
    """The groups of each question. One statement, whatever is asked and however much there is; devices that are retired
    do not count."""
    known: dict[str, object] = dict(_columns(said))
    for n, one in enumerate(asked):
        known |= {f"{name}{n}": getattr(one, name) for name in ("host", "type", "resource_class", "project", "limit")}
        known |= dict(zip((f"first{n}", f"second{n}"), (*(one.after or ()), "", ""), strict=False))
    statement = " UNION ALL ".join(_statement(n, one) for n, one in enumerate(asked))
    found: list[list[Group]] = [[] for _ in asked]
    with connection.cursor() as cursor:
        cursor.execute(f"{statement} ORDER BY n, place", known)
        for n, _, first, second, total, held, free, reserved, *load in cursor.fetchall():
            names = (first, second)[: len(asked[n].by)]
            found[n].append(Group(names, total, held, free, reserved, Load(*load)))
    return found


def of_hosts(hosts: Collection[int], said: Collection[Said]) -> dict[int, Load]:
    """How busy each of these hosts is, where it has devices: all of them together. One statement; devices that are
    retired or not known do not count."""
    with connection.cursor() as cursor:
        cursor.execute(_HOSTS, {**_columns(said), "asked": list(hosts)})
        return {host: Load(*load) for host, *load in cursor.fetchall()}


def _statement(n: int, asked: Asked) -> str:
    keys, by_project = [COLUMNS[name] for name in asked.by], "project" in asked.by
    sign = "<" if asked.order.startswith("-") else ">"
    beyond = f'WHERE (k1 COLLATE "C", k2 COLLATE "C") {sign} (%(first{n})s, %(second{n})s)'
    return _GROUPS.format(
        n=n,
        said=_SAID,
        load=_LOAD,
        first=keys[0],
        second=keys[1] if len(keys) > 1 else "''",
        total="NULL::bigint" if by_project else "p.num_accelerators",
        free="NULL::bigint" if by_project else _FREE,
        holders=(_OF_PROJECTS if by_project else _OF_ALL).format(n=n),
        beyond=beyond if asked.after else "",
        order=ORDERS[asked.order],
    )


def _columns(said: Collection[Said]) -> dict[str, list[object]]:
    """As arrays, which PostgreSQL joins in a fraction of the time of so many rows of values."""
    names = {"hosts": "host", "keys": "key", "busy": "busy", "used": "used", "size": "size", "power": "power"}
    return {column: [getattr(one, field) for one in said] for column, field in names.items()}
