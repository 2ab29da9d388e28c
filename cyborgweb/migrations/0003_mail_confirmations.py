"""Let recipients confirm mail subscriptions. Existing subscriptions count as confirmed."""

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("cyborgweb", "0002_mail_server"),
    ]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            model_name="subscription",
            name="confirmed_at",
            field=models.DateTimeField(
                blank=True,
                editable=False,
                help_text="When the recipient of the mails confirmed the address; empty while it waits for confirmation.",
                null=True,
            ),
        ),
        # Without a default: what the former release inserts during the upgrade waits for confirmation.
        migrations.RunSQL("UPDATE cyborgweb_subscription SET confirmed_at = now()", migrations.RunSQL.noop),
        migrations.CreateModel(
            name="ConfirmationRequest",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("address", models.CharField(db_collation="C", max_length=320)),
                ("project_id", models.CharField(db_collation="C", max_length=255)),
                ("asked_by", models.CharField(db_collation="C", max_length=255)),
                ("asked_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["address", "asked_at"], name="confirmation_address"),
                    models.Index(fields=["asked_by", "asked_at"], name="confirmation_asker"),
                ],
            },
        ),
    ]
