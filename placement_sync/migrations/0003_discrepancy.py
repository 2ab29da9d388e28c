"""What Placement, Nova and the hardware contradict, and what is remembered to find it."""

import uuid

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0006_images"),
        ("placement_sync", "0002_writer"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="tree",
            options={"verbose_name": "host in Placement", "verbose_name_plural": "hosts in Placement"},
        ),
        migrations.AddField(
            model_name="tree",
            name="compare_at",
            field=models.DateTimeField(help_text="When it is compared again although nothing moved.", null=True),
        ),
        migrations.AddField(
            model_name="tree",
            name="compared_at",
            field=models.DateTimeField(help_text="The look after which `faults` compared it last.", null=True),
        ),
        migrations.AddField(
            model_name="writtenprovider",
            name="claims",
            field=models.JSONField(
                help_text="Who has allocations there, as of which generation (`faults`).", null=True
            ),
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
                ("instance", models.UUIDField(help_text="The instance, or whatever else is Placement's consumer.")),
                ("since", models.DateTimeField(help_text="When it was seen first.")),
                ("seen_at", models.DateTimeField(help_text="When it was seen last.")),
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
