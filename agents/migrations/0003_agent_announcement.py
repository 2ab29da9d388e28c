"""Store which announcement of a certificate each agent has."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("agents", "0002_used_nonces"),
    ]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            model_name="agent",
            name="fingerprint",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="The pinned certificate of its last connection; empty if it pins none.",
                max_length=64,
            ),
        ),
        migrations.AddField(
            model_name="agent",
            name="announcement",
            field=models.BigIntegerField(
                blank=True,
                help_text="Number of the newest announcement of a certificate that it has; 0: none yet; null: it accepts none.",
                null=True,
            ),
        ),
    ]
