"""Add generations to subscriptions."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("cyborgweb", "0004_subscription_owners")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            "subscription",
            "generation",
            models.BigIntegerField(
                default=1, db_default=1, editable=False, help_text="It grows by 1 with each change of the settings."
            ),
        ),
    ]
