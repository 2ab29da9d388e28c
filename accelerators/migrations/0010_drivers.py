"""What is wanted of drivers on hosts, and the rollouts that bring it there."""

import uuid

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

VIEW = """
CREATE VIEW accelerators_hostdriver AS
SELECT ('x' || substr(md5(h.id || ' ' || k.driver), 1, 15))::bit(60)::bigint AS id,
  (h.uuid || ':' || k.driver) COLLATE "C" AS key, (h.name || ' ' || k.driver) COLLATE "C" AS place, h.id AS host_id,
  k.driver COLLATE "C" AS driver, s.seen, s.state, coalesce((s.seen ->> 'devices')::int, 0) AS devices, w.id AS wish_id,
  CASE WHEN w.id IS NULL THEN false
    ELSE coalesce((s.seen ->> 'generation')::bigint, 0) <> w.generation
      OR CASE WHEN w.installed AND w.enabled THEN s.state <> 'ok' ELSE s.state NOT IN ('disabled', 'absent') END
  END AS drifts
FROM accelerators_host h
CROSS JOIN LATERAL (
  SELECT jsonb_object_keys(h.drivers) UNION SELECT v.driver FROM accelerators_driverwish v WHERE v.host_id = h.id
) k(driver)
CROSS JOIN LATERAL (
  SELECT h.drivers -> k.driver AS seen, CASE WHEN NOT h.drivers ? k.driver THEN 'absent'
    WHEN h.drivers -> k.driver ->> 'state' <> '' THEN h.drivers -> k.driver ->> 'state'
    WHEN h.drivers -> k.driver ->> 'error' <> '' THEN 'failed' ELSE 'ok' END AS state
) s
LEFT JOIN accelerators_driverwish w ON w.host_id = h.id AND w.driver = k.driver
"""


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0009_backends"),
    ]

    operations = [
        migrations.CreateModel(
            name="Rollout",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                (
                    "op",
                    models.CharField(
                        choices=[("install", "install"), ("update", "update"), ("uninstall", "uninstall")],
                        max_length=16,
                    ),
                ),
                ("driver", models.CharField(db_collation="C", max_length=64)),
                ("enabled", models.BooleanField(help_text="Null: as it is; installed ones are enabled.", null=True)),
                ("settings", models.JSONField(help_text="Null: as they are.", null=True)),
                ("selection", models.CharField(default="", help_text="How the hosts were chosen.", max_length=1000)),
                ("max_parallel", models.IntegerField(default=5)),
                ("stop_on_failure", models.BooleanField(default=True)),
                ("total", models.IntegerField(default=0)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("running", "running"),
                            ("done", "done"),
                            ("stopped", "stopped"),
                            ("cancelled", "cancelled"),
                        ],
                        default="running",
                        max_length=16,
                    ),
                ),
                ("actor", models.CharField(db_collation="C", max_length=255)),
                (
                    "source",
                    models.CharField(
                        choices=[
                            ("person", "person"),
                            ("agent", "agent"),
                            ("api", "api"),
                            ("rule", "rule"),
                            ("system", "system"),
                        ],
                        max_length=16,
                    ),
                ),
                ("reason", models.TextField(blank=True, default="")),
                ("request_id", models.CharField(blank=True, default="", max_length=64)),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "verbose_name": "driver rollout",
                "ordering": ["-id"],
                "indexes": [
                    models.Index(
                        condition=models.Q(("ended_at__isnull", True)), fields=["id"], name="rollout_under_way"
                    )
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("state__in", ["running", "done", "stopped", "cancelled"])),
                        name="rollout_state_known",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="DriverWish",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("driver", models.CharField(db_collation="C", max_length=64)),
                ("installed", models.BooleanField(default=True)),
                ("enabled", models.BooleanField(default=True)),
                ("settings", models.JSONField(help_text="Null: those of the host's own file.", null=True)),
                ("generation", models.BigIntegerField(default=1)),
                ("actor", models.CharField(db_collation="C", max_length=255)),
                ("reason", models.TextField(blank=True, default="")),
                (
                    "command",
                    models.ForeignKey(
                        db_constraint=False,
                        help_text="Which told it last.",
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accelerators.command",
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="wishes", to="accelerators.host"
                    ),
                ),
            ],
            options={
                "verbose_name": "wanted driver",
                "ordering": ["host", "driver"],
                "constraints": [models.UniqueConstraint(fields=("host", "driver"), name="driver_wish_one_per_host")],
            },
        ),
        migrations.CreateModel(
            name="RolloutStep",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("host_name", models.CharField(db_collation="C", max_length=255)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("waiting", "waiting"),
                            ("ordered", "ordered"),
                            ("done", "done"),
                            ("failed", "failed"),
                            ("skipped", "skipped"),
                        ],
                        default="waiting",
                        max_length=16,
                    ),
                ),
                ("text", models.TextField(blank=True, default="")),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                (
                    "command",
                    models.ForeignKey(
                        db_constraint=False,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accelerators.command",
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accelerators.host",
                    ),
                ),
                (
                    "rollout",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="steps", to="accelerators.rollout"
                    ),
                ),
            ],
            options={
                "verbose_name": "host of a driver rollout",
                "verbose_name_plural": "hosts of driver rollouts",
                "ordering": ["id"],
                "indexes": [
                    models.Index(
                        condition=models.Q(("state__in", ["waiting", "ordered"])),
                        fields=["rollout", "id"],
                        name="rollout_step_open",
                    )
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("state__in", ["waiting", "ordered", "done", "failed", "skipped"])),
                        name="rollout_step_state_known",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="HostDriver",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ],
            options={
                "verbose_name": "driver",
                "db_table": "accelerators_hostdriver",
                "ordering": ["place"],
                "managed": False,
            },
        ),
        migrations.RunSQL(VIEW, "DROP VIEW accelerators_hostdriver"),
    ]
