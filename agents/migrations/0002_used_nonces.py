"""Record which nonces were used, so that a challenge of one gateway can be answered at another, and only once."""

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("agents", "0001_initial"),
    ]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.CreateModel(
            name="UsedNonce",
            fields=[
                ("nonce", models.CharField(db_collation="C", max_length=64, primary_key=True, serialize=False)),
                (
                    "used_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True),
                ),
            ],
        ),
    ]
