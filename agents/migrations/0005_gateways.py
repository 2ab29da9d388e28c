"""Where the processes that hold agents' connections are reached."""

from django.db import migrations, models
from django.db.models.functions import Now


class Migration(migrations.Migration):
    dependencies = [
        ("agents", "0004_writes"),
    ]

    operations = [
        migrations.CreateModel(
            name="Gateway",
            fields=[
                ("url", models.CharField(db_collation="C", max_length=255, primary_key=True, serialize=False)),
                (
                    "name",
                    models.CharField(db_collation="C", help_text="Another one after every start.", max_length=100),
                ),
                ("seen_at", models.DateTimeField(db_default=Now())),
            ],
        ),
    ]
