"""Add what a confirmation is compared with: who chose the objects, which devices were held, and desired states."""

from django.db import migrations, models

EMPTY = {"default": "", "db_default": "", "blank": True}
SOURCES = [("person", "person"), ("agent", "agent"), ("api", "api"), ("rule", "rule"), ("system", "system")]
ROLLOUT_STATES = ["draft", "running", "done", "stopped", "cancelled"]


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0008_audit_status_and_pauses")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            "bulk", "caller_id", models.CharField(max_length=255, help_text="The user id of the actor.", **EMPTY)
        ),
        migrations.AddField(
            "bulk",
            "source",
            models.CharField(
                max_length=16,
                choices=SOURCES,
                default="person",
                db_default="person",
                help_text="The source of its events.",
            ),
        ),
        migrations.AddField(
            "bulkitem",
            "held",
            models.BooleanField(
                default=False,
                db_default=False,
                help_text="Whether a request held the device when the devices were selected.",
            ),
        ),
        migrations.AddField(
            "rollout", "caller_id", models.CharField(max_length=255, help_text="The user id of the actor.", **EMPTY)
        ),
        migrations.AddField(
            "rolloutstep",
            "generation",
            models.BigIntegerField(
                null=True,
                help_text="The generation of the driver's desired state when the hosts were chosen, 0 if it had none; "
                "null: any.",
            ),
        ),
        migrations.AlterField(
            "rollout",
            "state",
            models.CharField(max_length=16, choices=[(word, word) for word in ROLLOUT_STATES], default="running"),
        ),
        migrations.RemoveConstraint("rollout", "rollout_state_known"),
        migrations.AddConstraint(
            "rollout",
            models.CheckConstraint(condition=models.Q(state__in=ROLLOUT_STATES), name="rollout_state_known"),
        ),
    ]
