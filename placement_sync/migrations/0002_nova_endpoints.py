"""Store which addresses of Nova have shown an instance that holds a request, so that their answer 404 is believed."""

import uuid

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("placement_sync", "0001_initial"),
    ]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.CreateModel(
            name="NovaEndpoint",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                (
                    "url",
                    models.CharField(
                        help_text="The address of Nova, without a slash at its end.",
                        max_length=500,
                        unique=True,
                        verbose_name="address",
                    ),
                ),
                (
                    "proven_at",
                    models.DateTimeField(
                        help_text="When it first showed an instance that held a request here; null: never.", null=True
                    ),
                ),
                (
                    "confirmed_at",
                    models.DateTimeField(
                        help_text="When an administrator confirmed that it is the Nova of this cloud; null: never.",
                        null=True,
                    ),
                ),
                ("confirmed_by", models.CharField(blank=True, db_default="", default="", max_length=255)),
                (
                    "reason",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="Why it was confirmed; empty: not said.",
                        max_length=500,
                    ),
                ),
                (
                    "unknown_instances",
                    models.PositiveIntegerField(
                        db_default=0,
                        default=0,
                        help_text="Instances that hold requests here and that it answered 404 for, so far; 0 if it is trusted.",
                    ),
                ),
                (
                    "changes_since",
                    models.DateTimeField(
                        help_text="By Nova's clock: up to here its listings of deleted instances were read completely.",
                        null=True,
                    ),
                ),
                (
                    "next_changes_since",
                    models.DateTimeField(
                        help_text="The next value of `changes_since`, once all pages of the present listing are read.",
                        null=True,
                    ),
                ),
                (
                    "page_marker",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="The last instance of the last page read.",
                        max_length=64,
                    ),
                ),
                (
                    "looked_up_to",
                    models.UUIDField(
                        help_text="The instance that was looked up last in turn; the next run continues behind it.",
                        null=True,
                    ),
                ),
            ],
            options={
                "verbose_name": "address of Nova",
                "verbose_name_plural": "addresses of Nova",
                "ordering": ["id"],
            },
        ),
        migrations.AlterField(
            model_name="vanished",
            name="since",
            field=models.DateTimeField(
                db_default=django.db.models.functions.datetime.Now(),
                help_text="When Nova first listed it as deleted or answered 404.",
            ),
        ),
        migrations.AddField(
            model_name="vanished",
            name="endpoint",
            field=models.ForeignKey(
                help_text="The address of Nova that gave this answer; null: it is not known, so the answer does not count.",
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                to="placement_sync.novaendpoint",
            ),
        ),
    ]
