"""Add the table of released handles that a guest may still use, and the column with the reported use of each handle."""

import uuid
from pathlib import Path

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

SQL = Path(__file__).with_name("sql") / "released_handles.sql"
REVERSE_SQL = """
DROP TRIGGER accelerators_forget_release ON accelerators_attachhandle;
DROP FUNCTION accelerators_forget_release();
DROP TRIGGER request_gets_no_released_handle ON accelerators_acceleratorrequest;
DROP TRIGGER generation_count ON accelerators_releasedhandle;
DROP FUNCTION accelerators_refuse_released_handle();
"""


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0001_initial")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            model_name="attachhandle",
            name="in_use",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="As last reported: guest, unknown, or empty if no guest can use it or its driver does not tell.",
                max_length=16,
            ),
        ),
        migrations.CreateModel(
            name="ReleasedHandle",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                (
                    "instance",
                    models.UUIDField(blank=True, help_text="The instance that had the handle.", null=True),
                ),
                ("ask_at", models.DateTimeField(help_text="When the host is asked again.")),
                (
                    "ask_until",
                    models.DateTimeField(
                        blank=True,
                        help_text="When its device is quarantined; empty once that has been done.",
                        null=True,
                    ),
                ),
                (
                    "answer",
                    models.TextField(blank=True, default="", help_text="Why the host has not confirmed it yet."),
                ),
                (
                    "handle",
                    models.OneToOneField(
                        db_constraint=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="release",
                        to="accelerators.attachhandle",
                    ),
                ),
            ],
            options={"ordering": ["id"]},
        ),
        migrations.RunSQL(SQL.read_text(), REVERSE_SQL),
    ]
