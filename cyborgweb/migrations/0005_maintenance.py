"""Read only for a while."""

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("cyborgweb", "0004_notify"),
    ]

    operations = [
        migrations.CreateModel(
            name="Maintenance",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "since",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="Since when nothing can be changed.",
                    ),
                ),
                ("by", models.CharField(help_text="Who said so.", max_length=255)),
                (
                    "reason",
                    models.CharField(blank=True, help_text="Why; shown to everybody who is refused.", max_length=4096),
                ),
            ],
            options={
                "verbose_name_plural": "maintenance",
                "constraints": [models.CheckConstraint(condition=models.Q(("id", 1)), name="maintenance_is_one")],
            },
        ),
    ]
