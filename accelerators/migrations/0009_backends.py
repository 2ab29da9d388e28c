from __future__ import annotations

from django.db import migrations, models

BACKENDS = """
CREATE VIEW accelerators_backend AS
SELECT hashtextextended(k.key, 0) & 9223372036854775807 AS id, k.key,
  (h.name || ' ' || d.key || ' ' || b.key) COLLATE "C" AS place, h.name AS host, d.key COLLATE "C" AS driver,
  b.key COLLATE "C" AS name, b.value ->> 'kind' AS kind, b.value -> 'labels' AS labels, b.value ->> 'error' AS error,
  (b.value ->> 'since')::timestamptz AS since, b.value -> 'services' AS services,
  (SELECT count(*) FROM accelerators_device v WHERE v.host_id = h.id AND v.driver = d.key AND v.backend = b.key)
    AS devices
FROM accelerators_host h CROSS JOIN LATERAL jsonb_each(h.drivers) d
CROSS JOIN LATERAL jsonb_each(d.value -> 'backends') b
CROSS JOIN LATERAL (SELECT (h.uuid::text || ':' || d.key || ':' || b.key) COLLATE "C" AS key) k
"""
"""What the last reports say of drivers' backends, a row each: they are stored where they come in, in `Host.drivers`."""
SERVICES = """
CREATE VIEW accelerators_service AS
SELECT hashtextextended(k.key, 0) & 9223372036854775807 AS id, k.key,
  (b.place || ' ' || (s.value ->> 'name')) COLLATE "C" AS place, b.host, b.driver, b.name AS backend,
  s.value ->> 'name' AS name, s.value ->> 'version' AS version, s.value ->> 'state' AS state,
  s.value ->> 'reason' AS reason, s.value -> 'limits' AS limits
FROM accelerators_backend b CROSS JOIN LATERAL jsonb_array_elements(b.services) s
CROSS JOIN LATERAL (SELECT (b.key || ':' || (s.value ->> 'name')) COLLATE "C" AS key) k
"""


def _text(length: int, help_text: str) -> models.CharField:
    return models.CharField(blank=True, db_default="", default="", help_text=help_text, max_length=length)


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0008_bulks")]
    operations: list[migrations.operations.base.Operation] = [
        migrations.AddField("device", "backend", _text(64, "The part of its driver that found it.")),
        migrations.AddField("device", "changeable", _text(255, "The words of a layout that its driver takes.")),
        migrations.AddField("device", "sized_by", _text(64, "The one of them that says how many handles.")),
        migrations.AlterField(
            "host",
            "drivers",
            models.JSONField(
                default=dict,
                help_text="Per driver: error (empty when it answered), since when, its number of devices, its faults, "
                "and its backends by name, each with error, since when, and services.",
            ),
        ),
        migrations.AddField("device", "bridges", _text(255, "PCI bridges above it, root first.")),
        migrations.RunSQL(BACKENDS, "DROP VIEW accelerators_backend"),
        migrations.RunSQL(SERVICES, "DROP VIEW accelerators_service"),
        *(
            migrations.CreateModel(
                name,
                [("id", models.BigIntegerField(primary_key=True, serialize=False))],
                options={"managed": False, "db_table": f"accelerators_{name.lower()}", "ordering": ["key"]},
            )
            for name in ("Backend", "Service")
        ),
    ]
