"""Who writes to Placement."""

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("placement_sync", "0001_initial"),
    ]

    operations = [
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
                        default=0, help_text="Grows by one with every change; an older one writes no more."
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
    ]
