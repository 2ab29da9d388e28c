"""Images that devices are programmed with."""

import uuid

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0005_commands"),
    ]

    operations = [
        migrations.CreateModel(
            name="Image",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("name", models.CharField(blank=True, db_collation="C", default="", max_length=255)),
                ("size", models.BigIntegerField()),
                ("sha256", models.CharField(db_collation="C", max_length=64)),
                (
                    "properties",
                    models.JSONField(default=dict, help_text="Words about it, as Glance has them: accel:function_id …"),
                ),
                ("source", models.CharField(choices=[("glance", "glance"), ("upload", "upload")], max_length=8)),
                (
                    "by",
                    models.CharField(db_collation="C", default="", help_text="Who put it here.", max_length=255),
                ),
                (
                    "used_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="When a command was last given it.",
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
            },
        ),
        migrations.AddConstraint(
            model_name="image",
            constraint=models.CheckConstraint(
                condition=models.Q(("source__in", ["glance", "upload"])), name="image_source_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="image",
            constraint=models.CheckConstraint(condition=models.Q(("size__gte", 0)), name="image_size_not_negative"),
        ),
        migrations.AddIndex(
            model_name="image",
            index=models.Index(
                condition=models.Q(("source", "glance")), fields=["used_at"], name="image_longest_unused"
            ),
        ),
    ]
