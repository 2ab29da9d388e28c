"""Index the hosts without applied report, which every gateway looks for every few seconds."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0004_one_function_one_request")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddIndex(
            model_name="host",
            index=models.Index(
                condition=models.Q(("applied_hash", "")), fields=["id"], name="host_without_applied_report"
            ),
        ),
    ]
