"""Add the pauses between holder checks of jobs, and the table of the jobs that seal and verify events."""

from django.db import migrations, models
from django.db.models.functions import Now

ATTEMPTS = {"default": 0, "db_default": 0}
DUE = {"null": True, "blank": True, "help_text": "Not tried again before this time."}
TEXT = {"default": "", "db_default": "", "blank": True}


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0007_sign_seals")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AlterField(
            "seal",
            "kind",
            models.CharField(
                max_length=8,
                db_collation="C",
                help_text="What it records: `events`, `drop` (of a month), `key` (another key signs from the next seal "
                "on) or `restored` (the database was restored from a backup). Empty in seals that are not signed.",
                **TEXT,
            ),
        ),
        migrations.AddField(
            "rolloutstep",
            "attempts",
            models.IntegerField(help_text="How often it stayed unknown whether the devices are held.", **ATTEMPTS),
        ),
        migrations.AddField("rolloutstep", "next_at", models.DateTimeField(**DUE)),
        migrations.AddField(
            "bulkitem",
            "attempts",
            models.IntegerField(help_text="How often it stayed unknown whether the device is held.", **ATTEMPTS),
        ),
        migrations.AddField("bulkitem", "next_at", models.DateTimeField(**DUE)),
        migrations.CreateModel(
            "AuditStatus",
            [
                (
                    "node",
                    models.CharField(
                        primary_key=True,
                        serialize=False,
                        max_length=255,
                        db_collation="C",
                        help_text="The name of the machine.",
                    ),
                ),
                ("updated_at", models.DateTimeField(db_default=Now(), help_text="When a job last wrote this row.")),
                (
                    "sealed_at",
                    models.DateTimeField(
                        null=True,
                        blank=True,
                        help_text="When the job `seals` last succeeded, with a precision of a minute.",
                    ),
                ),
                ("refusal", models.TextField(help_text="Why this node seals nothing.", **TEXT)),
                ("refused_since", models.DateTimeField(null=True, blank=True)),
                (
                    "verified_number",
                    models.BigIntegerField(
                        help_text="All seals up to this number were verified since the verification began.", **ATTEMPTS
                    ),
                ),
                (
                    "verified_at",
                    models.DateTimeField(
                        null=True, blank=True, help_text="When the newest seal of that time had been verified."
                    ),
                ),
                (
                    "findings",
                    models.IntegerField(help_text="How many differences the verification found.", **ATTEMPTS),
                ),
                ("finding", models.TextField(help_text="The first difference.", **TEXT)),
                (
                    "restored_at",
                    models.DateTimeField(null=True, blank=True, help_text="When the database was last restored."),
                ),
                ("restore", models.TextField(help_text="What the seal of that restore says.", **TEXT)),
            ],
            options={"verbose_name_plural": "audit status"},
        ),
    ]
