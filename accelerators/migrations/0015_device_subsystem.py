"""Add the PCI subsystem of devices."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0014_wanted_backends")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            model_name="device",
            name="subsystem",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="The PCI ids by which the maker of the board identifies it, such as 10de:1533; "
                "empty if unknown.",
                max_length=9,
            ),
        ),
    ]
