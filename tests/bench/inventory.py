"""Fill the tables for the rows of the API: ready devices, a device profile, requests of other projects, tokens."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import connection

from accelerators import conductor
from accelerators.domain.diff import HostReport
from accelerators.inventory import merge
from accelerators.models import DeviceProfile
from accelerators.requests import profiles
from cyborgweb.models import ApiToken
from drivers.inventory import DriverReport
from tests.bench import fixtures, messages
from tests.bench.api_clients import PROFILE

PER_HOST = 10
BATCH_SIZE = 100
OWN_DEPLOYABLES = 2
"""Number of deployables for the requests of the measuring clients; the rest is for requests of other projects."""
HANDLES = 8

MAKE_READY = """
UPDATE accelerators_device SET state = 'ready';
UPDATE accelerators_deployable SET rp_uuid = gen_random_uuid();
"""
INSERT_HANDLES = """INSERT INTO accelerators_attachhandle (uuid, deployable_id, attach_type, attach_info)
SELECT gen_random_uuid(), p.id, 'PCI', '{"domain": "bench", "bus": "' || n || '"}' """
INSERT_OWN_HANDLES = f"""{INSERT_HANDLES} FROM generate_series(2, {HANDLES}) AS n,
  (SELECT id FROM accelerators_deployable ORDER BY id LIMIT {OWN_DEPLOYABLES}) AS p
"""
SELECT_OFFERS = f"""
SELECT h.name, p.rp_uuid::text FROM accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id
JOIN accelerators_host h ON h.id = d.host_id ORDER BY p.id LIMIT {OWN_DEPLOYABLES}
"""
INSERT_OTHER_REQUESTS = f"""
WITH part AS (SELECT id, row_number() OVER (ORDER BY id) - 1 AS place, count(*) OVER () AS parts
  FROM (SELECT id FROM accelerators_deployable ORDER BY id OFFSET {OWN_DEPLOYABLES}) AS p),
handle AS ({INSERT_HANDLES} FROM generate_series(1, %(count)s) AS n JOIN part AS p ON p.place = n %% p.parts
  RETURNING id, deployable_id)
INSERT INTO accelerators_acceleratorrequest (uuid, project_id, state, profile_id, group_id, "group", hostname,
  device_rp_uuid, instance_uuid, deployable_id, attach_handle_id, fault, label, updated_at)
SELECT gen_random_uuid(), 'p' || t.id %% 100, 'Bound', f.id, 0, f.groups::jsonb -> 0, h.name,
  p.rp_uuid, gen_random_uuid(), p.id, t.id, '', '', now()
FROM handle t JOIN accelerators_deployable p ON p.id = t.deployable_id JOIN accelerators_device d ON d.id = p.device_id
JOIN accelerators_host h ON h.id = d.host_id, accelerators_deviceprofile f WHERE f.name = %(profile)s
"""
DELETE_REQUESTS = f"""
TRUNCATE accelerators_acceleratorrequest;
DELETE FROM accelerators_attachhandle t WHERE t.deployable_id NOT IN (
  SELECT id FROM accelerators_deployable ORDER BY id LIMIT {OWN_DEPLOYABLES})
  AND t.attach_info LIKE '%"domain": "bench"%';
"""
TABLES = ("acceleratorrequest", "attachhandle", "device", "deployable", "host")


def create_ready_devices(count: int) -> list[tuple[str, str]]:
    """Create `count` ready devices; return (host, provider) of those with handles for the clients' own requests."""
    fixtures.empty_inventory()
    hosts = fixtures.enrol(max(1, count // PER_HOST))
    for first in range(0, len(hosts), BATCH_SIZE):
        batch = enumerate(hosts[first : first + BATCH_SIZE], first)
        merge.merge_reports({host: [_report(number)] for number, host in batch})
    with conductor.writing(), connection.cursor() as cursor:
        cursor.execute(MAKE_READY)
        cursor.execute(INSERT_OWN_HANDLES)
        DeviceProfile.objects.get_or_create(name=PROFILE, defaults={"groups": [{"resources:FPGA": "1"}]})
        cursor.execute(SELECT_OFFERS)
        offers: list[tuple[str, str]] = cursor.fetchall()
    _analyze()
    profiles.clear_profile_cache()
    return offers


def _report(number: int) -> HostReport:
    found = messages.devices(PER_HOST, messages.host_name(number))
    return HostReport(1, number + 1, format(number, "040x"), (DriverReport("bench_driver", "", found),))


def create_other_requests(count: int) -> list[str]:
    """Create `count` Bound requests of other projects, each of its own instance; return a hundred instance ids."""
    with conductor.writing(), connection.cursor() as cursor:
        cursor.execute(INSERT_OTHER_REQUESTS, {"count": count, "profile": PROFILE})
        cursor.execute("SELECT instance_uuid::text FROM accelerators_acceleratorrequest ORDER BY uuid LIMIT 100")
        found = [row[0] for row in cursor.fetchall()]
    _analyze()
    return found


def delete_requests() -> None:
    """Delete all requests, and all handles except those for the clients' own requests."""
    with conductor.writing(), connection.cursor() as cursor:
        cursor.execute(DELETE_REQUESTS)
    _analyze()


def _analyze() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM ANALYZE {', '.join(f'accelerators_{name}' for name in TABLES)}")
        cursor.execute("CHECKPOINT")


def create_tokens() -> dict[str, str]:
    """Create tokens; return the headers of an administrator whose request also has Nova's service token."""
    user, _ = User.objects.get_or_create(username="bench-caller")
    ApiToken.objects.filter(user=user).delete()
    return {
        "X-Auth-Token": ApiToken.create_with_secret("bench-admin", user, ["admin", "member", "reader"], "bench"),
        "X-Service-Token": ApiToken.create_with_secret("bench-nova", user, ["service"], "services"),
    }
