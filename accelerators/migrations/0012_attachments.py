"""What is attached to running instances."""

import uuid

import django.contrib.postgres.fields
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0011_accelerators")]

    operations = [
        migrations.CreateModel(
            name="Attachment",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("instance", models.UUIDField()),
                ("project_id", models.CharField(db_collation="C", help_text="The instance's.", max_length=255)),
                ("host", models.CharField(db_collation="C", help_text="Where the instance is.", max_length=255)),
                (
                    "profile",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        default="",
                        help_text="The device profile asked for; else a device is.",
                        max_length=255,
                    ),
                ),
                ("device", models.UUIDField(blank=True, help_text="The device asked for.", null=True)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("asked", "asked"),
                            ("attaching", "attaching"),
                            ("attached", "attached"),
                            ("undoing", "undoing"),
                            ("failed", "failed"),
                            ("detaching", "detaching"),
                            ("detached", "detached"),
                        ],
                        default="asked",
                        max_length=16,
                    ),
                ),
                ("step", models.CharField(blank=True, default="", max_length=16)),
                ("steps", models.JSONField(default=list, help_text="What was done and when: step, at, text.")),
                (
                    "requests",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.UUIDField(),
                        default=list,
                        help_text="The accelerator requests made for it, in order.",
                        size=None,
                    ),
                ),
                (
                    "providers",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.UUIDField(), default=list, help_text="Where each request is bound.", size=None
                    ),
                ),
                ("shares", models.JSONField(default=dict, help_text="What is claimed: provider → class and amount.")),
                (
                    "claim",
                    models.JSONField(
                        help_text="The last write to Placement that claims, before it is tried.", null=True
                    ),
                ),
                (
                    "release",
                    models.JSONField(
                        help_text="The last write to Placement that gives back, before it is tried.", null=True
                    ),
                ),
                ("fault", models.TextField(blank=True, default="", help_text="Why it failed, or what is in its way.")),
                ("actor", models.CharField(db_collation="C", max_length=255)),
                ("reason", models.TextField(blank=True, default="")),
                ("request_id", models.CharField(blank=True, default="", max_length=64)),
                ("attached_at", models.DateTimeField(blank=True, null=True)),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "ordering": ["-id"],
                "indexes": [
                    models.Index(fields=["instance", "-id"], name="attachment_instance"),
                    models.Index(condition=models.Q(("state", "attached")), fields=["id"], name="attachment_attached"),
                    models.Index(
                        condition=models.Q(("ended_at__isnull", False)), fields=["ended_at"], name="attachment_ended"
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            (
                                "state__in",
                                ["asked", "attaching", "attached", "undoing", "failed", "detaching", "detached"],
                            )
                        ),
                        name="attachment_state_known",
                    )
                ],
            },
        ),
    ]
