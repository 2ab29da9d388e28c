"""Add the state of the mail server, which all worker processes share."""

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("cyborgweb", "0001_initial"),
    ]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.CreateModel(
            name="MailServer",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("failures", models.IntegerField(default=0)),
                ("retry_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("last_error", models.TextField(default="")),
            ],
            options={
                "default_permissions": (),
            },
        ),
    ]
