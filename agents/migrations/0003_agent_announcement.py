"""Store which certificate each agent pins, and which one it accepts in place of it."""

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
            name="newest_certificate",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="The certificate to which the announcements that it has lead; empty if it accepts none.",
                max_length=64,
            ),
        ),
    ]
