from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0010_generations_of_settings"),
    ]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            model_name="host",
            name="removing_since",
            field=models.DateTimeField(
                blank=True,
                help_text="Since when it is being removed; empty if it is not. No report of it is merged any more.",
                null=True,
            ),
        ),
    ]
