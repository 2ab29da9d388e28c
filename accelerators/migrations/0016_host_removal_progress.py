"""Store when the removal of a host begins to delete, and index the requests by host name, which a removal looks for."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0015_device_subsystem"),
    ]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            model_name="host",
            name="deleting_since",
            field=models.DateTimeField(
                blank=True,
                help_text="Since when its removal deletes what is stored of it; empty if the removal can be cancelled.",
                null=True,
            ),
        ),
        migrations.AddIndex(
            model_name="acceleratorrequest",
            index=models.Index(
                condition=models.Q(("hostname__isnull", False)), fields=["hostname"], name="request_hostname"
            ),
        ),
    ]
