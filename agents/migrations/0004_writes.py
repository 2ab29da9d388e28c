"""Whether an agent can write to Placement itself."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("agents", "0003_commands"),
    ]

    operations = [
        migrations.AddField(
            model_name="agent",
            name="writes",
            field=models.TextField(
                blank=True,
                help_text="Why it cannot write to Placement itself; empty: it can; none: it has never said.",
                null=True,
            ),
        ),
    ]
