"""Commands to agents, and what a device says of its installation."""

import uuid

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0004_lifecycle"),
    ]

    operations = [
        migrations.CreateModel(
            name="Command",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("device_name", models.CharField(blank=True, db_collation="C", default="", max_length=255)),
                ("op", models.CharField(db_collation="C", max_length=16)),
                (
                    "arguments",
                    models.JSONField(default=dict, help_text="As the wire has them: driver, key, handle, layout …"),
                ),
                ("exclusive", models.BooleanField(default=False)),
                (
                    "request",
                    models.UUIDField(blank=True, help_text="The accelerator request that waits for it.", null=True),
                ),
                ("actor", models.CharField(db_collation="C", default="", max_length=255)),
                ("request_id", models.CharField(blank=True, default="", max_length=64)),
                ("reason", models.TextField(blank=True, default="")),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("preparing", "preparing"),
                            ("queued", "queued"),
                            ("taken", "taken"),
                            ("started", "started"),
                            ("succeeded", "succeeded"),
                            ("failed", "failed"),
                            ("refused", "refused"),
                            ("expired", "expired"),
                            ("unknown", "unknown"),
                        ],
                        default="queued",
                        max_length=16,
                    ),
                ),
                ("start_by", models.DateTimeField(help_text="Not begun by then, it never will be.")),
                ("end_by", models.DateTimeField(help_text="Not answered by then, its outcome is unknown.")),
                ("taken_at", models.DateTimeField(blank=True, null=True)),
                ("started_at", models.DateTimeField(blank=True, null=True)),
                ("percent", models.IntegerField(default=0)),
                ("progress", models.CharField(blank=True, default="", max_length=500)),
                ("answered_at", models.DateTimeField(blank=True, null=True)),
                (
                    "outcome",
                    models.CharField(
                        blank=True, default="", help_text="The agent's word for how it ended.", max_length=16
                    ),
                ),
                ("text", models.TextField(blank=True, default="", help_text="How it ended, in a sentence.")),
                ("detail", models.JSONField(default=dict)),
                ("report_epoch", models.BigIntegerField(default=0)),
                ("report_seq", models.BigIntegerField(default=0)),
                ("report_hash", models.CharField(blank=True, default="", max_length=64)),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "ordering": ["-id"],
            },
        ),
        migrations.RemoveConstraint(
            model_name="attribute",
            name="attribute_origin_known",
        ),
        migrations.AddField(
            model_name="device",
            name="acts",
            field=models.CharField(
                blank=True, default="", help_text="What can be asked of its driver.", max_length=255
            ),
        ),
        migrations.AddField(
            model_name="device",
            name="busy_with",
            field=models.UUIDField(
                blank=True, help_text="The exclusive command that is under way; nothing is bound meanwhile.", null=True
            ),
        ),
        migrations.AddField(
            model_name="device",
            name="to_install",
            field=models.TextField(
                blank=True, default="", help_text="What its driver would do to make it ready, a line a step."
            ),
        ),
        migrations.AlterField(
            model_name="attribute",
            name="origin",
            field=models.CharField(
                choices=[("agent", "agent"), ("operator", "operator"), ("conductor", "conductor")],
                default="agent",
                max_length=16,
            ),
        ),
        migrations.AddConstraint(
            model_name="attribute",
            constraint=models.CheckConstraint(
                condition=models.Q(("origin__in", ["agent", "operator", "conductor"])), name="attribute_origin_known"
            ),
        ),
        migrations.AddField(
            model_name="command",
            name="device",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="commands",
                to="accelerators.device",
            ),
        ),
        migrations.AddField(
            model_name="command",
            name="host",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="commands", to="accelerators.host"
            ),
        ),
        migrations.AddIndex(
            model_name="command",
            index=models.Index(
                condition=models.Q(("ended_at__isnull", True)), fields=["host", "id"], name="command_open"
            ),
        ),
        migrations.AddIndex(
            model_name="command",
            index=models.Index(
                condition=models.Q(("ended_at__isnull", True)), fields=["end_by"], name="command_deadline"
            ),
        ),
        migrations.AddIndex(
            model_name="command",
            index=models.Index(
                condition=models.Q(("request__isnull", False)), fields=["request"], name="command_request"
            ),
        ),
        migrations.AddIndex(
            model_name="command",
            index=models.Index(fields=["device", "-id"], name="command_device"),
        ),
        migrations.AddConstraint(
            model_name="command",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    (
                        "state__in",
                        [
                            "preparing",
                            "queued",
                            "taken",
                            "started",
                            "succeeded",
                            "failed",
                            "refused",
                            "expired",
                            "unknown",
                        ],
                    )
                ),
                name="command_state_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="command",
            constraint=models.UniqueConstraint(
                condition=models.Q(("ended_at__isnull", True), ("exclusive", True)),
                fields=("device",),
                name="command_one_exclusive_per_device",
            ),
        ),
        migrations.RunSQL(
            "CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_command "
            "FOR EACH STATEMENT EXECUTE FUNCTION generation_count('commands')",
            migrations.RunSQL.noop,
        ),
    ]
