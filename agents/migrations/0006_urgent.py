"""Reports that show a fault are known in the spool."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("agents", "0005_gateways"),
    ]

    operations = [
        migrations.AddField(
            model_name="spooled",
            name="urgent",
            field=models.BooleanField(
                db_default=False, default=False, help_text="It shows a fault: merged before others."
            ),
        ),
        migrations.AddIndex(
            model_name="spooled",
            index=models.Index(condition=models.Q(("urgent", True)), fields=["host"], name="spool_urgent"),
        ),
    ]
