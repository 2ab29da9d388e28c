"""Let bulk actions have attachments and accelerators as their objects.

The columns `device_uuid` and `device_name` of items keep their names in the database, because the former release reads
and writes them; only the fields are called `target_uuid` and `target_name`.
"""

import django.db.models.deletion
from django.db import migrations, models

KINDS = [("device", "device"), ("attachment", "attachment"), ("accelerator", "accelerator")]
TARGET_UUID_HELP = "The uuid of the object; of an accelerator that of its request."


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0012_arguments_of_bulk_actions")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AddField(
            "bulk",
            "target",
            models.CharField(
                max_length=16,
                choices=KINDS,
                default="device",
                db_default="device",
                help_text="The kind of its objects.",
            ),
        ),
        migrations.AddField(
            "bulk",
            "project_id",
            models.CharField(
                max_length=255,
                db_collation="C",
                default="",
                db_default="",
                blank=True,
                help_text="The project to which all its objects belong; empty if the caller may see all projects.",
            ),
        ),
        migrations.AlterField(
            "bulkitem",
            "stood",
            models.TextField(
                help_text="The state of the object when it was selected: that of the device or of the attachment, or "
                "the label."
            ),
        ),
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AlterField("bulkitem", "device_uuid", models.UUIDField(db_column="device_uuid")),
                migrations.RenameField("bulkitem", "device_uuid", "target_uuid"),
                migrations.AlterField(
                    "bulkitem", "target_uuid", models.UUIDField(db_column="device_uuid", help_text=TARGET_UUID_HELP)
                ),
                migrations.AlterField(
                    "bulkitem",
                    "device_name",
                    models.CharField(db_column="device_name", max_length=255, db_collation="C"),
                ),
                migrations.RenameField("bulkitem", "device_name", "target_name"),
                migrations.AlterModelOptions(
                    name="bulkitem",
                    options={
                        "ordering": ["id"],
                        "verbose_name": "object of a bulk action",
                        "verbose_name_plural": "objects of bulk actions",
                    },
                ),
                migrations.AlterField(
                    model_name="bulk",
                    name="action",
                    field=models.CharField(db_collation="C", help_text="The action for each object.", max_length=16),
                ),
                migrations.AlterField(
                    model_name="bulk",
                    name="arguments",
                    field=models.JSONField(
                        blank=True,
                        help_text="The arguments of the action, if it has any, such as the layout or the label.",
                        null=True,
                    ),
                ),
                migrations.AlterField(
                    model_name="bulk",
                    name="held_too",
                    field=models.BooleanField(
                        default=False, help_text="The confirmation includes objects that are held."
                    ),
                ),
                migrations.AlterField(
                    model_name="bulk",
                    name="selection",
                    field=models.CharField(
                        blank=True,
                        default="",
                        help_text="The filters of the list when the objects were selected.",
                        max_length=1000,
                    ),
                ),
                migrations.AlterField(
                    model_name="bulkitem",
                    name="attempts",
                    field=models.IntegerField(
                        db_default=0, default=0, help_text="How often it stayed unknown whether the object is held."
                    ),
                ),
                migrations.AlterField(
                    model_name="bulkitem",
                    name="device",
                    field=models.ForeignKey(
                        help_text="The device, if the object is one.",
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accelerators.device",
                    ),
                ),
                migrations.AlterField(
                    model_name="bulkitem",
                    name="held",
                    field=models.BooleanField(
                        db_default=False,
                        default=False,
                        help_text="Whether a request held the object when it was selected.",
                    ),
                ),
                migrations.AlterField(
                    model_name="bulkitem",
                    name="outcome",
                    field=models.CharField(
                        blank=True,
                        choices=[("moved", "moved"), ("unchanged", "unchanged"), ("refused", "refused")],
                        default="",
                        help_text="The outcome; empty until the object was processed.",
                        max_length=16,
                    ),
                ),
                migrations.AlterField(
                    model_name="bulkitem",
                    name="state",
                    field=models.CharField(
                        blank=True, default="", help_text="The state of the object afterwards.", max_length=16
                    ),
                ),
            ]
        ),
    ]
