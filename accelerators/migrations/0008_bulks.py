"""What is asked of many devices at once."""

import uuid

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0007_search"),
    ]

    operations = [
        migrations.CreateModel(
            name="Bulk",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("action", models.CharField(db_collation="C", help_text="What is asked of each.", max_length=16)),
                (
                    "then",
                    models.CharField(
                        choices=[("maintenance", "maintenance"), ("retired", "retired")],
                        default="maintenance",
                        max_length=16,
                    ),
                ),
                (
                    "selection",
                    models.CharField(
                        blank=True, default="", help_text="The list's filters when the set was chosen.", max_length=1000
                    ),
                ),
                ("total", models.IntegerField(default=0)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("draft", "draft"),
                            ("running", "running"),
                            ("done", "done"),
                            ("cancelled", "cancelled"),
                        ],
                        default="draft",
                        max_length=16,
                    ),
                ),
                (
                    "dry",
                    models.BooleanField(default=False, help_text="What is worked on is a dry run: nothing is changed."),
                ),
                (
                    "held_too",
                    models.BooleanField(default=False, help_text="Confirmed for devices that somebody holds, too."),
                ),
                ("actor", models.CharField(db_collation="C", max_length=255)),
                ("reason", models.TextField(blank=True, default="")),
                ("request_id", models.CharField(blank=True, default="", max_length=64)),
                ("started_at", models.DateTimeField(blank=True, null=True)),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                ("moved", models.IntegerField(default=0)),
                ("unchanged", models.IntegerField(default=0)),
                ("refused", models.IntegerField(default=0)),
            ],
            options={
                "verbose_name": "bulk action",
                "ordering": ["-id"],
                "indexes": [
                    models.Index(condition=models.Q(("state", "running")), fields=["updated_at"], name="bulk_under_way")
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("state__in", ["draft", "running", "done", "cancelled"])),
                        name="bulk_state_known",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="BulkItem",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("device_uuid", models.UUIDField()),
                ("device_name", models.CharField(db_collation="C", max_length=255)),
                ("host", models.CharField(db_collation="C", max_length=255)),
                ("stood", models.CharField(help_text="How the device stood when the set was chosen.", max_length=64)),
                (
                    "outcome",
                    models.CharField(
                        blank=True,
                        choices=[("moved", "moved"), ("unchanged", "unchanged"), ("refused", "refused")],
                        default="",
                        help_text="Empty: not worked on yet.",
                        max_length=16,
                    ),
                ),
                ("why", models.CharField(blank=True, default="", help_text="The kind of refusal.", max_length=16)),
                (
                    "state",
                    models.CharField(blank=True, default="", help_text="The device's, afterwards.", max_length=16),
                ),
                ("text", models.TextField(blank=True, default="")),
                (
                    "bulk",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="items", to="accelerators.bulk"
                    ),
                ),
                (
                    "device",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accelerators.device",
                    ),
                ),
            ],
            options={
                "verbose_name": "device of a bulk action",
                "verbose_name_plural": "devices of bulk actions",
                "ordering": ["id"],
                "indexes": [
                    models.Index(condition=models.Q(("outcome", "")), fields=["bulk", "id"], name="bulk_item_waiting"),
                    models.Index(fields=["bulk", "outcome", "id"], name="bulk_item_outcome"),
                ],
            },
        ),
        migrations.AddIndex(
            model_name="device",
            index=models.Index(
                condition=models.Q(("status__in", ("degraded", "failed"))), fields=["status"], name="device_unwell"
            ),
        ),
    ]
