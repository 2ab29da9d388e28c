"""A number by which whoever changes a device is told that somebody else did."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0010_drivers")]
    operations = [
        migrations.AddField(
            model_name="device",
            name="generation",
            field=models.BigIntegerField(
                db_default=0,
                default=0,
                help_text="Grows with every exclusive command, and when its attach handles change.",
            ),
        ),
    ]
