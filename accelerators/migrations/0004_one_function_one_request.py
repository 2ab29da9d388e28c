"""One physical function is in at most one request; a node name and a resource provider belong to one host.

It must not run before the tables' rows obey the new constraints, so the `.sql` files mend them first.
"""

from pathlib import Path

import django.db.models.deletion
from django.db import migrations, models

SQL = Path(__file__).with_name("sql")


def run_file(name: str) -> migrations.RunSQL:
    """Run all statements of a file of `sql/`."""
    return migrations.RunSQL((SQL / f"{name}.sql").read_text())


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0003_add_lifetime_of_programs")]

    operations = [
        migrations.CreateModel(
            name="ProviderOwner",
            fields=[
                ("provider", models.UUIDField(primary_key=True, serialize=False)),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="+", to="accelerators.host"
                    ),
                ),
            ],
        ),
        migrations.AddField(
            model_name="device",
            name="physical_function",
            field=models.CharField(
                blank=True,
                help_text="PCI address of its card's function, if the device is a virtual function.",
                max_length=32,
                null=True,
            ),
        ),
        run_file("claims"),
        run_file("owners"),
        migrations.AddConstraint(
            model_name="host",
            constraint=models.UniqueConstraint(fields=("node",), name="host_one_per_node"),
        ),
    ]
