"""What this room remembers."""

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("accelerators", "0006_images"),
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
                ("root", models.UUIDField(help_text="The compute provider.", null=True)),
                (
                    "looked_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True),
                ),
                ("synced_at", models.DateTimeField(help_text="When all was as it should be.", null=True)),
                ("problems", models.JSONField(default=list, help_text="What could not be done, in sentences.")),
            ],
        ),
        migrations.CreateModel(
            name="Vanished",
            fields=[
                ("instance", models.UUIDField(primary_key=True, serialize=False)),
                (
                    "since",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="The first listing that lacked it.",
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="WrittenProvider",
            fields=[
                ("uuid", models.UUIDField(primary_key=True, serialize=False)),
                ("classes", models.JSONField(default=list)),
                ("traits", models.JSONField(default=list)),
                ("seen", models.JSONField(help_text="name, parent, generation, inventories, traits.", null=True)),
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
    ]
