"""Store whether Nova listed a suspect as deleted, so that an address which suddenly knows no instance is noticed."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("placement_sync", "0002_nova_endpoints"),
    ]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            model_name="vanished",
            name="listed",
            field=models.BooleanField(
                db_default=False,
                default=False,
                help_text="Whether Nova listed it as deleted, and did not only answer 404.",
            ),
        ),
    ]
