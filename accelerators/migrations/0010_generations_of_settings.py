"""Add generations to settings that people change, and changes of single settings to rollouts."""

from django.db import migrations, models

GENERATION = {
    "default": 1,
    "db_default": 1,
    "editable": False,
    "help_text": "It grows by 1 with each change of the settings.",
}
EDITS_HELP = "Changes of single settings: `set` maps paths to values, `unset` lists paths."


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0009_confirmations")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField("admissionrule", "generation", models.BigIntegerField(**GENERATION)),
        migrations.AddField("deviceprofile", "generation", models.BigIntegerField(**GENERATION)),
        migrations.AddField("rollout", "edits", models.JSONField(null=True, help_text=EDITS_HELP)),
    ]
