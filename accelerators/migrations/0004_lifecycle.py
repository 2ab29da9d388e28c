"""Draining devices, and the rules that admit what is found."""

import uuid

import django.core.validators
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0003_generations"),
    ]

    operations = [
        migrations.CreateModel(
            name="AdmissionRule",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                (
                    "name",
                    models.CharField(
                        db_collation="C",
                        help_text="Letters, digits, ., - and _.",
                        max_length=64,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[a-zA-Z0-9_.-]+\\Z", "Say letters, digits, ., - and _ only."
                            )
                        ],
                    ),
                ),
                (
                    "order",
                    models.IntegerField(
                        default=100,
                        help_text="Rules are tried from the lowest number on.",
                        validators=[
                            django.core.validators.MinValueValidator(0),
                            django.core.validators.MaxValueValidator(1000000),
                        ],
                    ),
                ),
                (
                    "host",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        default="",
                        help_text="Name of the host; * and ? stand for what differs.",
                        max_length=255,
                    ),
                ),
                (
                    "driver",
                    models.CharField(
                        blank=True, db_collation="C", default="", help_text="Name of the driver.", max_length=64
                    ),
                ),
                (
                    "vendor",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        default="",
                        help_text="The vendor as the driver says it, 10de for example.",
                        max_length=255,
                    ),
                ),
                (
                    "model",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        default="",
                        help_text="Model or product; * and ? stand for what differs.",
                        max_length=255,
                    ),
                ),
                (
                    "type",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("GPU", "GPU"),
                            ("FPGA", "FPGA"),
                            ("AICHIP", "AICHIP"),
                            ("QAT", "QAT"),
                            ("NIC", "NIC"),
                            ("SSD", "SSD"),
                        ],
                        default="",
                        max_length=16,
                    ),
                ),
                (
                    "action",
                    models.CharField(
                        choices=[("ready", "ready"), ("inactive", "inactive"), ("quarantined", "quarantined")],
                        help_text="The state of a device that fits.",
                        max_length=16,
                    ),
                ),
                ("enabled", models.BooleanField(default=True)),
            ],
            options={
                "ordering": ["order", "id"],
            },
        ),
        migrations.AddField(
            model_name="device",
            name="drain_to",
            field=models.CharField(
                blank=True,
                choices=[("maintenance", "maintenance"), ("retired", "retired")],
                help_text="Draining: the state it takes up when its last request is gone.",
                max_length=16,
                null=True,
            ),
        ),
        migrations.AddIndex(
            model_name="device",
            index=models.Index(condition=models.Q(("drain_to__isnull", False)), fields=["id"], name="device_draining"),
        ),
        migrations.AddConstraint(
            model_name="device",
            constraint=models.CheckConstraint(
                condition=models.Q(("drain_to__in", ["maintenance", "retired"])), name="device_drain_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="device",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("drain_to__isnull", True),
                    models.Q(
                        models.Q(("state__in", ("ready", "installing")), _negated=True),
                        models.Q(
                            ("returns_to__isnull", True),
                            models.Q(("returns_to__in", ("ready", "installing")), _negated=True),
                            _connector="OR",
                        ),
                    ),
                    _connector="OR",
                ),
                name="device_that_drains_is_not_offered",
            ),
        ),
        migrations.AddConstraint(
            model_name="admissionrule",
            constraint=models.CheckConstraint(
                condition=models.Q(("action__in", ["ready", "inactive", "quarantined"])), name="rule_action_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="admissionrule",
            constraint=models.CheckConstraint(
                condition=models.Q(("type__in", ["", "GPU", "FPGA", "AICHIP", "QAT", "NIC", "SSD"])),
                name="rule_type_known",
            ),
        ),
    ]
