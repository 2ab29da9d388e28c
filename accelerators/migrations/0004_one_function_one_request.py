"""Let the database ensure that a physical function is in at most one request, and that a node name and a resource
provider belong to one host.

Rows that violate this already are corrected first: the `.sql` files quarantine the devices of such requests and
providers, and rename the node of the later host. Each correction of a device or host is an event.
"""

from pathlib import Path

import django.db.models.deletion
from django.db import migrations, models

SQL = Path(__file__).with_name("sql")
LOCK_TABLES = """
SET LOCAL lock_timeout = '3s';
LOCK TABLE accelerators_acceleratorrequest, accelerators_releasedhandle, accelerators_host, accelerators_device,
  accelerators_deployable
"""
"""Lock all tables that the migration alters, in the order in which binds lock their rows, so that the two cannot
deadlock. Requests wait behind a statement that waits for a table, so it gives up soon and is retried."""


def run_file(name: str) -> migrations.RunSQL:
    """Return the operation that runs all statements of the file `sql/<name>.sql`. It cannot be reversed."""
    return migrations.RunSQL((SQL / f"{name}.sql").read_text())


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0003_add_lifetime_of_programs")]

    operations = [
        migrations.RunSQL(LOCK_TABLES),
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
