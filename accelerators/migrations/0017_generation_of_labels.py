"""Add generations to requests: they count the changes of the label."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0016_host_removal_progress")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            "acceleratorrequest",
            "generation",
            models.BigIntegerField(
                default=1, db_default=1, editable=False, help_text="It grows by 1 with each change of the settings."
            ),
        ),
    ]
