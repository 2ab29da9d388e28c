"""The tables for the state written to Placement, for its writer on each host, and for discrepancies."""

import uuid

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("accelerators", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="Look",
            fields=[
                ("job", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("at", models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name="Tree",
            fields=[
                (
                    "host",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="placement",
                        serialize=False,
                        to="accelerators.host",
                    ),
                ),
                ("root", models.UUIDField(help_text="The compute provider of the host.", null=True)),
                (
                    "looked_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True),
                ),
                (
                    "synced_at",
                    models.DateTimeField(help_text="When Placement last matched the inventory completely.", null=True),
                ),
                ("problems", models.JSONField(default=list, help_text="What could not be done, as sentences.")),
                (
                    "compared_at",
                    models.DateTimeField(
                        help_text="The time of the observation that the job `faults` compared last.", null=True
                    ),
                ),
                (
                    "compare_at",
                    models.DateTimeField(help_text="When it is compared again even if nothing changed.", null=True),
                ),
            ],
            options={
                "verbose_name": "host in Placement",
                "verbose_name_plural": "hosts in Placement",
            },
        ),
        migrations.CreateModel(
            name="Vanished",
            fields=[
                ("instance", models.UUIDField(primary_key=True, serialize=False)),
                (
                    "since",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="The first listing of Nova in which it was missing.",
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Writer",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "who",
                    models.CharField(
                        choices=[("conductor", "Conductor"), ("agents", "Agents")], default="conductor", max_length=16
                    ),
                ),
                (
                    "epoch",
                    models.BigIntegerField(
                        default=0,
                        help_text="Increases by one with every change; writers with a smaller epoch stop writing.",
                    ),
                ),
                ("since", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("by", models.CharField(blank=True, default="", max_length=255)),
                ("reason", models.CharField(blank=True, default="", max_length=500)),
            ],
            options={
                "verbose_name_plural": "writer",
                "constraints": [
                    models.CheckConstraint(condition=models.Q(("id", 1)), name="writer_is_one_row"),
                    models.CheckConstraint(
                        condition=models.Q(("who__in", ["conductor", "agents"])), name="writer_known"
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="WrittenProvider",
            fields=[
                ("uuid", models.UUIDField(primary_key=True, serialize=False)),
                ("classes", models.JSONField(default=list)),
                ("traits", models.JSONField(default=list)),
                ("seen", models.JSONField(help_text="name, parent, generation, inventories, traits.", null=True)),
                (
                    "claims",
                    models.JSONField(
                        help_text="The consumers with allocations there, and the generation at which they were read (job `faults`).",
                        null=True,
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="written_providers",
                        to="accelerators.host",
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Discrepancy",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("unclaimed", "attached but unclaimed"),
                            ("unattached", "claimed but not attached"),
                            ("without_device", "instance without its device"),
                        ],
                        max_length=16,
                    ),
                ),
                ("provider", models.UUIDField()),
                ("provider_name", models.CharField(db_collation="C", max_length=255)),
                ("instance", models.UUIDField(help_text="The instance or other consumer in Placement.")),
                ("since", models.DateTimeField(help_text="When it was first seen.")),
                ("seen_at", models.DateTimeField(help_text="When it was last seen.")),
                ("said", models.TextField(help_text="What is wrong, and what to do.")),
                (
                    "device",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="discrepancies",
                        to="accelerators.device",
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="discrepancies",
                        to="accelerators.host",
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "discrepancies",
                "ordering": ["-id"],
                "constraints": [
                    models.UniqueConstraint(fields=("kind", "provider", "instance"), name="discrepancy_once"),
                    models.CheckConstraint(
                        condition=models.Q(("kind__in", ["unclaimed", "unattached", "without_device"])),
                        name="discrepancy_kind_known",
                    ),
                ],
            },
        ),
    ]
