"""What commands an agent takes."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("agents", "0002_trust"),
    ]

    operations = [
        migrations.AddField(
            model_name="agent",
            name="ops",
            field=models.TextField(
                blank=True,
                help_text="The commands it takes, with blanks between them; empty: it has never said.",
                null=True,
            ),
        ),
    ]
