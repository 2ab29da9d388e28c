"""Count units (total, held, free, reserved) and summarize the load of their devices, grouped by host, type, resource
class or project.

The counts are those of now; the events tell who held what in the past. The load comes from the devices' last samples,
which the database does not store: the caller passes them in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import connection

from accelerators.requests.binding_sql import FROM_FREE_HANDLES, OFFERED_COUNT

GROUP_COLUMNS = {
    "host": "h.name",
    "type": "d.type",
    "resource_class": "coalesce(a.value, '')",
    "project": "r.project_id",
}
"""The SQL expression for each name by which capacity can be grouped."""
ORDER_BY_CLAUSES = {
    "group": 'k1 COLLATE "C", k2 COLLATE "C"',
    "-group": 'k1 COLLATE "C" DESC, k2 COLLATE "C" DESC',
    "largest": 'coalesce(total, held) DESC, k1 COLLATE "C", k2 COLLATE "C"',
}
"""Order of the groups → its ORDER BY clause: by names, by names descending, or the largest groups first."""
_JOIN_HOLDERS = f"""LEFT JOIN (SELECT deployable_id, count(*) AS held FROM accelerators_acceleratorrequest
  WHERE attach_handle_id IS NOT NULL GROUP BY 1) r ON r.deployable_id = p.id
  LEFT JOIN (SELECT t.deployable_id, count(*) AS free {FROM_FREE_HANDLES} AND (%(host{{n}})s::text IS NULL
    OR d.host_id = (SELECT id FROM accelerators_host WHERE name = %(host{{n}})s)) GROUP BY 1) f
    ON f.deployable_id = p.id"""
_OFFERED_COUNT = OFFERED_COUNT.format(free="coalesce(f.free, 0)", held="coalesce(r.held, 0)")
_JOIN_HOLDERS_BY_PROJECT = """JOIN (SELECT deployable_id, project_id, count(*) AS held
  FROM accelerators_acceleratorrequest
  WHERE attach_handle_id IS NOT NULL AND (%(project{n})s::text IS NULL OR project_id = %(project{n})s)
  GROUP BY 1, 2) r ON r.deployable_id = p.id"""
_WITH_SAMPLES = """said AS (
  SELECT * FROM unnest(%(hosts)s::bigint[], %(keys)s::text[], %(busy)s::float8[], %(used)s::float8[],
    %(size)s::float8[], %(power)s::float8[]) AS s(host, key, busy, used, size, power))"""
_LOAD_COLUMNS = """count(*) AS devices, count(s.key) AS sampled, round(avg(busy)::numeric, 1)::float8 AS mean,
    round(max(busy)::numeric, 1)::float8 AS highest, sum(used) FILTER (WHERE size IS NOT NULL)::bigint AS used,
    sum(size) FILTER (WHERE used IS NOT NULL)::bigint AS size, round(sum(power)::numeric, 1)::float8 AS power"""
"""Columns of `LoadSummary`, over devices `x` joined with their samples `s`. Memory is summed only over devices that
give both numbers, so that `used` is always a part of `size`."""
_SELECT_LOAD_BY_HOST = f"""
WITH {_WITH_SAMPLES}
SELECT x.host_id, {_LOAD_COLUMNS}
FROM accelerators_device x LEFT JOIN said s ON s.host = x.host_id AND s.key = x.key
WHERE x.host_id = ANY(%(asked)s::bigint[]) AND x.state <> 'retired' GROUP BY 1
"""
_SELECT_GROUPS = """
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
class LastSample:
    """The last sample of one device, which is identified by the id of its host and its key.

    `busy` is the utilisation in percent, `used` and `size` are the memory in bytes, `power` is in watts. A number that
    the driver does not give is None.
    """

    host: int
    key: str
    busy: float | None
    used: float | None
    size: float | None
    power: float | None


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """The load of a set of `devices`, for `sampled` of which a sample was passed in.

    `mean` and `highest` are the utilisation in percent, `used` and `size` the memory in bytes of the devices that give
    both numbers, `power` the sum in watts. Each is None if no device gives that number.
    """

    devices: int = 0
    sampled: int = 0
    mean: float | None = None
    highest: float | None = None
    used: int | None = None
    size: int | None = None
    power: float | None = None


@dataclass(frozen=True)
class CapacityGroup:
    """The units of one group; `names` are its values of the columns in `CapacityQuery.by`.

    `free` units can be requested now; `reserved` units are those that are neither held nor free, whatever the reason. A
    group by project counts only what the project holds: its `total` and `free` are None, and its `reserved` is 0.
    """

    names: tuple[str, ...]
    total: int | None
    held: int
    free: int | None
    reserved: int
    load: LoadSummary = LoadSummary()

    @property
    def name(self) -> str:
        """The group's value of the first column in `CapacityQuery.by`, for example the host's name."""
        return self.names[0]


@dataclass(frozen=True)
class CapacityQuery:
    """A query for `query_groups`. `by`: one or two of GROUP_COLUMNS.

    `host`, `type`, `resource_class` and `project` filter; `project` has an effect only if `by` contains "project".
    `order` is one of ORDER_BY_CLAUSES. `after` (names of a group) returns only the groups that follow this one, for
    paging; only for the orders "group" and "-group". At most `limit` groups are returned.
    """

    by: Sequence[str]
    host: str | None = None
    type: str | None = None
    resource_class: str | None = None
    project: str | None = None
    order: str = "group"
    after: tuple[str, ...] | None = None
    limit: int = field(kw_only=True)


def query_groups(queries: Sequence[CapacityQuery], samples: Collection[LastSample] = ()) -> list[list[CapacityGroup]]:
    """Return the groups that each query asks for, in the order of the queries. Costs one statement for all of them.

    `queries` must not be empty. `samples` are the devices' last samples. Retired devices are not counted, and groups in
    which no unit exists or is held are left out. Raises KeyError for an unknown column in `by`, or an unknown `order`.
    """
    parameters: dict[str, Any] = dict(_build_sample_arrays(samples))
    for n, query in enumerate(queries):
        parameters |= {
            f"{name}{n}": getattr(query, name) for name in ("host", "type", "resource_class", "project", "limit")
        }
        parameters |= dict(zip((f"first{n}", f"second{n}"), (*(query.after or ()), "", ""), strict=False))
    statement = " UNION ALL ".join(_build_statement(n, one) for n, one in enumerate(queries))
    groups_by_query: list[list[CapacityGroup]] = [[] for _ in queries]
    with connection.cursor() as cursor:
        cursor.execute(f"{statement} ORDER BY n, place", parameters)
        for n, _, first, second, total, held, free, reserved, *load in cursor.fetchall():
            names = (first, second)[: len(queries[n].by)]
            groups_by_query[n].append(CapacityGroup(names, total, held, free, reserved, LoadSummary(*load)))
    return groups_by_query


def query_load_by_host(hosts: Collection[int], samples: Collection[LastSample]) -> dict[int, LoadSummary]:
    """Return the load of each of these hosts (by id), all its devices together; one statement.

    Hosts without devices are left out. Retired devices, and samples of unknown devices, are not counted.
    """
    with connection.cursor() as cursor:
        cursor.execute(_SELECT_LOAD_BY_HOST, {**_build_sample_arrays(samples), "asked": list(hosts)})
        return {host: LoadSummary(*load) for host, *load in cursor.fetchall()}


def _build_statement(n: int, query: CapacityQuery) -> str:
    """Build the SELECT for query number `n`; the names of its parameters end in `n`."""
    keys, by_project = [GROUP_COLUMNS[name] for name in query.by], "project" in query.by
    comparison = "<" if query.order.startswith("-") else ">"
    after_condition = f'WHERE (k1 COLLATE "C", k2 COLLATE "C") {comparison} (%(first{n})s, %(second{n})s)'
    return _SELECT_GROUPS.format(
        n=n,
        said=_WITH_SAMPLES,
        load=_LOAD_COLUMNS,
        first=keys[0],
        second=keys[1] if len(keys) > 1 else "''",
        total="NULL::bigint" if by_project else "p.num_accelerators",
        free="NULL::bigint" if by_project else _OFFERED_COUNT,
        holders=(_JOIN_HOLDERS_BY_PROJECT if by_project else _JOIN_HOLDERS).format(n=n),
        beyond=after_condition if query.after else "",
        order=ORDER_BY_CLAUSES[query.order],
    )


def _build_sample_arrays(samples: Collection[LastSample]) -> dict[str, list[object]]:
    """Return the samples as SQL parameters: one array per column.

    PostgreSQL joins arrays much faster than as many rows of VALUES.
    """
    names = {"hosts": "host", "keys": "key", "busy": "busy", "used": "used", "size": "size", "power": "power"}
    return {column: [getattr(sample, field) for sample in samples] for column, field in names.items()}
