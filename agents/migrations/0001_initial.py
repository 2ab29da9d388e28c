"""Agents, their join tokens and leases, gateways, and the spool of reports."""

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("accelerators", "0001_initial"),
    ]

    operations = [
        # It orders connections across gateways. A clock could be set back and make a restart look like a second holder.
        migrations.RunSQL("CREATE SEQUENCE agents_connection"),
        migrations.CreateModel(
            name="Gateway",
            fields=[
                ("url", models.CharField(db_collation="C", max_length=255, primary_key=True, serialize=False)),
                (
                    "name",
                    models.CharField(db_collation="C", help_text="A new name after every start.", max_length=100),
                ),
                ("seen_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
        ),
        migrations.CreateModel(
            name="Agent",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("public_key", models.CharField(db_collation="C", max_length=64, unique=True)),
                ("enrolled_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "key_since",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(), help_text="Since when it has this key."
                    ),
                ),
                (
                    "barred",
                    models.CharField(
                        blank=True,
                        choices=[("", "None"), ("revoked", "Revoked"), ("clone", "Clone")],
                        db_default="",
                        default="",
                        max_length=16,
                    ),
                ),
                ("barred_reason", models.CharField(blank=True, db_default="", default="", max_length=500)),
                (
                    "rotate_asked_at",
                    models.DateTimeField(
                        blank=True, help_text="When a new key was requested that the agent has not sent yet.", null=True
                    ),
                ),
                (
                    "changed_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        db_index=True,
                        help_text="When its key, its barring or its connection last changed.",
                    ),
                ),
                ("version", models.CharField(blank=True, default="", max_length=64)),
                (
                    "wire",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="Protocol version that was agreed at its last connection.",
                        max_length=32,
                    ),
                ),
                ("boot_id", models.CharField(blank=True, default="", max_length=64)),
                (
                    "ops",
                    models.TextField(
                        blank=True,
                        help_text="The commands that it accepts, separated by blanks; null if it has never reported them.",
                        null=True,
                    ),
                ),
                (
                    "writes",
                    models.TextField(
                        blank=True,
                        help_text="Why it cannot write to Placement itself; empty if it can; null if it has never reported this.",
                        null=True,
                    ),
                ),
                ("connected_at", models.DateTimeField(blank=True, null=True)),
                (
                    "connection",
                    models.BigIntegerField(
                        db_default=0,
                        default=0,
                        help_text="Number of its last connection; later ones have higher numbers.",
                    ),
                ),
                (
                    "epoch",
                    models.BigIntegerField(db_default=0, default=0, help_text="The epoch of its last connection."),
                ),
                ("address", models.CharField(blank=True, db_default="", default="", max_length=64)),
                (
                    "host",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE, related_name="agent", to="accelerators.host"
                    ),
                ),
            ],
            options={
                "ordering": ["host__name"],
            },
        ),
        migrations.CreateModel(
            name="JoinToken",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("host_name", models.CharField(db_collation="C", max_length=255)),
                ("secret_hash", models.CharField(max_length=64, unique=True)),
                (
                    "public_key",
                    models.CharField(
                        blank=True, default="", help_text="The public key that was bound with it.", max_length=64
                    ),
                ),
                ("created_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("created_by", models.CharField(blank=True, default="", max_length=255)),
                ("expires_at", models.DateTimeField()),
                ("used_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("public_key", ""), ("used_at__isnull", False), _connector="OR"),
                        name="token_bound_means_used",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Lease",
            fields=[
                (
                    "host",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="lease",
                        serialize=False,
                        to="accelerators.host",
                    ),
                ),
                ("seen_at", models.DateTimeField()),
                ("epoch", models.BigIntegerField(default=0)),
            ],
            options={
                "indexes": [models.Index(fields=["seen_at"], name="lease_seen")],
            },
        ),
        migrations.CreateModel(
            name="Spooled",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("epoch", models.BigIntegerField()),
                ("seq", models.BigIntegerField()),
                ("received_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("payload", models.TextField(help_text="The Report message as it was received.")),
                (
                    "urgent",
                    models.BooleanField(
                        db_default=False, default=False, help_text="It reports a fault, so it is merged before others."
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        db_constraint=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="accelerators.host",
                    ),
                ),
            ],
            options={
                "db_table": "spool",
                "indexes": [models.Index(condition=models.Q(("urgent", True)), fields=["host"], name="spool_urgent")],
            },
        ),
    ]
