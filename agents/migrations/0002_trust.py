"""Who may connect: bars, and what is needed to see a second holder of a key."""

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("agents", "0001_initial"),
    ]

    operations = [
        # Orders connections across gateways. A clock could be set back, and make a restart look like a second holder.
        migrations.RunSQL("CREATE SEQUENCE agents_connection", "DROP SEQUENCE agents_connection"),
        migrations.AddField(
            model_name="agent",
            name="connection",
            field=models.BigIntegerField(
                db_default=0, default=0, help_text="Number of its last connection; later ones have higher numbers."
            ),
        ),
        migrations.AddField(
            model_name="agent",
            name="address",
            field=models.CharField(blank=True, db_default="", default="", max_length=64),
        ),
        migrations.AddField(
            model_name="agent",
            name="barred",
            field=models.CharField(
                blank=True,
                choices=[("", "None"), ("revoked", "Revoked"), ("clone", "Clone")],
                db_default="",
                default="",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="agent",
            name="barred_reason",
            field=models.CharField(blank=True, db_default="", default="", max_length=500),
        ),
        migrations.AddField(
            model_name="agent",
            name="changed_at",
            field=models.DateTimeField(
                db_default=django.db.models.functions.datetime.Now(),
                db_index=True,
                help_text="When its key, its bar or its connection last changed.",
            ),
        ),
        migrations.AddField(
            model_name="agent",
            name="epoch",
            field=models.BigIntegerField(db_default=0, default=0, help_text="Of its last connection."),
        ),
        migrations.AddField(
            model_name="agent",
            name="key_since",
            field=models.DateTimeField(
                db_default=django.db.models.functions.datetime.Now(), help_text="Since when it has this key."
            ),
        ),
        migrations.AddField(
            model_name="agent",
            name="rotate_asked_at",
            field=models.DateTimeField(
                blank=True, help_text="When somebody asked for a new key that it has not told yet.", null=True
            ),
        ),
    ]
