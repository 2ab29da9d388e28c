"""Index the commands by request id, by which the page of a bulk action finds the commands that it ordered."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0017_generation_of_labels")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddIndex(
            model_name="command",
            index=models.Index(fields=["request_id"], name="command_request_id"),
        ),
    ]
