"""The rows of the console's lists: complete pages of the list of devices, and of searches, served by granian."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import User
from django.db import connection

from accelerators import conductor
from accelerators.inventory import seed
from accelerators.models import Host
from cyborgweb.auth.sessions import SessionStore
from tests.bench import fixtures
from tests.bench.figures import Row, cpu_s
from tests.bench.granian_server import run_granian
from tests.bench.lab import Generator, Lab
from tests.bench.product import list_children
from tests.bench.statements import collect_statements

LIST = "/admin/accelerators/device/"
PAGES = (LIST, f"{LIST}?state__exact=ready", f"{LIST}?p=100", f"{LIST}?o=6", f"{LIST}?stale=yes")
"""The default page, a filtered one, page 100, another order, and a filter on a column of the hosts."""
HOSTS = 500
MAX_MS, MAX_STATEMENTS = 200, 12
SEED_HOSTS = 1000
EVENT_WORDS = ("device", "olga", "maintenance", "gpus", "device.seeded", "device.inactive", "no-such-word")
"""Words that all events have, that a third of them has, the newest of them far behind the newest event, that one event
has, and that none has."""
FIRST_SEEDED_DEVICE = """
SELECT h.name, d.uuid::text, d.address, substring(d.key FROM 8), p.uuid::text, t.uuid::text
FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id
JOIN accelerators_deployable p ON p.device_id = d.id JOIN accelerators_attachhandle t ON t.deployable_id = p.id
WHERE starts_with(d.key, 'serial:') AND starts_with(h.name, 'seed-') ORDER BY h.name DESC, d.id LIMIT 1
"""

DEVICES = """
INSERT INTO accelerators_device (uuid, host_id, key, driver, type, vendor, model, address, status, state, updated_at,
  std_board_info, vendor_board_info, numa_node, kernel_driver, to_install, acts, status_reason, state_reason, state_by)
SELECT gen_random_uuid(), h.id, 'pci:' || a.address || '/' || n, 'bench_driver',
  (ARRAY['GPU', 'FPGA', 'NIC'])[n %% 3 + 1], '10de', 'L40S', a.address, 'ok',
  (ARRAY['ready', 'inactive'])[n %% 2 + 1], now(), '', '', 0, '', '', '', '', '', 'agent'
FROM accelerators_host h, generate_series(1, %(each)s) AS n,
  LATERAL (SELECT '0000:' || lpad(to_hex(n %% 256), 2, '0') || ':00.0' AS address) AS a
"""


def rows(lab: Lab, generator: Generator, devices: int, seconds: float, progress: Callable[[str], None]) -> list[Row]:
    """Return the row: one client gets page after page; statements are counted in PostgreSQL's log."""
    progress(f"the console's list of {devices} devices, through granian")
    create_devices(devices)
    arguments = {"tokens": {"Cookie": f"sessionid={create_session()}"}, "paths": list(PAGES), "clients": 1}
    with run_granian(lab, 1) as server:
        everyone = [server.pid, *list_children(server.pid)]
        generator.ask("fetch", port=server.port, seconds=1.0, **arguments)
        before = sum(map(cpu_s, everyone))
        done = generator.ask("fetch", port=server.port, seconds=seconds, **arguments)
        spent = (sum(map(cpu_s, everyone)) - before) / done["count"] * 1e6
        with collect_statements(lab) as counted:
            few = generator.ask("fetch", port=server.port, seconds=1.0, **arguments)
    each = len(counted) / few["count"]
    p95 = done["slowest_ms"][-(done["count"] // 20 + 1)]
    note = (
        f"p95 of {done['count']} pages of 50 rows, five addresses in turn; p50 {done['p50_ms']:.0f} ms, {done['bytes']}"
        f" bytes, {each:.1f} statements each, the connection's health check among them"
    )
    fixtures.empty_inventory()
    value = float(p95)
    named = f"the console's list of {devices} devices"
    holds = each < MAX_STATEMENTS + 1
    return [Row(named, value, "ms", "a person's patience", MAX_MS, cpu_us=spent, note=note, holds=holds)]


def search_rows(
    lab: Lab, generator: Generator, devices: int, events: int, seconds: float, progress: Callable[[str], None]
) -> list[Row]:
    """Return a row for the search of devices and their parts, and one for the search of events.

    One client searches for one device in every way, for its host, and for frequent and rare words. The value of a row
    is that of its slowest search; the reference is the same list without a search.
    """
    progress(f"searches of {devices} devices and {events} events, through granian")
    fixtures.empty_inventory()
    seed.insert_rows(SEED_HOSTS, devices, events, lambda inserted: None, beside_real_hosts=True)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE accelerators_device, accelerators_deployable, accelerators_attachhandle")
        cursor.execute("VACUUM ANALYZE accelerators_event, accelerators_host")
        cursor.execute(FIRST_SEEDED_DEVICE)
        host, uuid, address, serial, deployable, handle = cursor.fetchone()
    admin = "/admin/accelerators"
    device_paths = [f"{LIST}?q={term}" for term in (host, uuid[:8], serial, address)]
    device_paths += [f"{admin}/deployable/?q={term}" for term in (host, deployable[:8], address)]
    device_paths += [f"{admin}/attachhandle/?q={term}" for term in (host, handle[:8])]
    device_paths += [f"/admin/find/?q={term}" for term in ("seed-00", address)]
    event_list = f"{admin}/event/"
    event_paths = [f"{event_list}?q={term}" for term in (host, uuid, uuid[:8], serial, address, *EVENT_WORDS)]
    event_paths += [f"{event_list}?q={host}+device.maintenance", f"{event_list}?q=olga&p=200"]
    found = []
    with run_granian(lab, 1) as server:
        groups = (f"{devices} devices", LIST, device_paths), (f"{events} events", event_list, event_paths)
        for name, reference, paths in groups:
            p95_by_path = {
                path: _measure_p95_ms(generator, server.port, path, max(0.5, seconds / len(paths)))
                for path in (reference, *paths)
            }
            unsearched = p95_by_path.pop(reference)
            slowest = max(p95_by_path, key=p95_by_path.__getitem__)
            fastest = min(p95_by_path.values())
            note = f"p95 of the slowest of {len(paths)} searches, {slowest}; the fastest {fastest:.0f} ms"
            title, value = f"the console's search of {name}", p95_by_path[slowest]
            found.append(Row(title, value, "ms", "the list without a search", MAX_MS, ceiling=unsearched, note=note))
    fixtures.empty_inventory()
    with conductor.writing():
        Host.objects.filter(name__startswith="seed-").delete()
    return found


def _measure_p95_ms(generator: Generator, port: int, path: str, seconds: float) -> float:
    """Return the 95th percentile of the time of a page, for one client that gets it again and again."""
    arguments = {"tokens": {"Cookie": f"sessionid={create_session()}"}, "paths": [path], "clients": 1, "port": port}
    generator.ask("fetch", seconds=0.2, **arguments)
    done = generator.ask("fetch", seconds=seconds, **arguments)
    return float(done["slowest_ms"][-(done["count"] // 20 + 1)])


def create_devices(devices: int) -> None:
    """Create about `devices` devices on `HOSTS` hosts and update PostgreSQL's statistics."""
    fixtures.empty_inventory()
    fixtures.enrol(HOSTS)
    with conductor.writing(), connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM accelerators_host")
        cursor.execute(DEVICES, {"each": devices // cursor.fetchone()[0]})
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE accelerators_device, accelerators_host")


def create_session() -> str:
    """Return the key of a new session of a superuser."""
    user, _ = User.objects.get_or_create(username="bench-operator", is_staff=True, is_superuser=True)
    session = SessionStore()
    session[SESSION_KEY], session[HASH_SESSION_KEY] = str(user.pk), user.get_session_auth_hash()
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session.create()
    return str(session.session_key)
