"""Add the arguments of bulk actions, which changes of units have."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0011_host_removing_since")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            model_name="bulk",
            name="arguments",
            field=models.JSONField(
                blank=True,
                help_text="The arguments of the action, if it has any: units, layout, generation.",
                null=True,
            ),
        ),
    ]
