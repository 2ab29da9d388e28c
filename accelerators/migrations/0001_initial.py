"""The tables, views, functions and triggers of the inventory. Objects that the ORM cannot describe are in `sql/`."""

import uuid
from pathlib import Path

import django.contrib.postgres.fields
import django.core.validators
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

import accelerators.models.fields

SQL = Path(__file__).with_name("sql")


def run_file(name: str) -> migrations.RunSQL:
    """Run all statements of a file of `sql/`."""
    return migrations.RunSQL((SQL / f"{name}.sql").read_text())


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Backend",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("key", models.TextField(help_text="HOST:DRIVER:NAME with the uuid of the host.")),
                ("place", models.TextField(help_text="Sort key: the name of the host, then the other parts.")),
                ("host", models.TextField()),
                ("driver", models.TextField()),
                ("name", models.TextField()),
                ("kind", models.TextField()),
                ("labels", models.JSONField()),
                ("error", models.TextField()),
                ("since", models.DateTimeField()),
                ("services", models.JSONField()),
                ("devices", models.IntegerField()),
            ],
            options={
                "db_table": "accelerators_backend",
                "ordering": ["key"],
                "managed": False,
            },
        ),
        migrations.CreateModel(
            name="HostDriver",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "key",
                    models.CharField(
                        db_collation="C", help_text="The host's uuid and the driver's name.", max_length=128
                    ),
                ),
                (
                    "place",
                    models.CharField(db_collation="C", help_text="Sort key: host, driver.", max_length=400),
                ),
                ("driver", models.CharField(db_collation="C", max_length=64)),
                ("seen", models.JSONField(help_text="The driver's entry in `Host.drivers`.", null=True)),
                ("state", models.CharField(max_length=16)),
                ("devices", models.IntegerField()),
                ("drifts", models.BooleanField(help_text="Whether the reported state differs from the wanted one.")),
            ],
            options={
                "verbose_name": "driver",
                "db_table": "accelerators_hostdriver",
                "ordering": ["place"],
                "managed": False,
            },
        ),
        migrations.CreateModel(
            name="Service",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("key", models.TextField(help_text="HOST:DRIVER:BACKEND:NAME with the uuid of the host.")),
                ("place", models.TextField(help_text="Sort key: the name of the host, then the other parts.")),
                ("host", models.TextField()),
                ("driver", models.TextField()),
                ("backend", models.TextField()),
                ("name", models.TextField()),
                ("version", models.TextField()),
                ("state", models.TextField()),
                ("reason", models.TextField()),
                ("limits", models.JSONField()),
            ],
            options={
                "db_table": "accelerators_service",
                "ordering": ["key"],
                "managed": False,
            },
        ),
        migrations.CreateModel(
            name="Device",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                (
                    "key",
                    models.CharField(
                        db_collation="C",
                        help_text="Identity on its host: serial:…, else pci:ADDRESS, else a key of the driver.",
                        max_length=255,
                    ),
                ),
                ("driver", models.CharField(db_collation="C", max_length=64)),
                (
                    "type",
                    models.CharField(
                        choices=[
                            ("GPU", "GPU"),
                            ("FPGA", "FPGA"),
                            ("AICHIP", "AICHIP"),
                            ("QAT", "QAT"),
                            ("NIC", "NIC"),
                            ("SSD", "SSD"),
                        ],
                        max_length=16,
                    ),
                ),
                ("vendor", models.CharField(db_collation="C", max_length=255)),
                ("model", models.CharField(db_collation="C", max_length=255)),
                (
                    "address",
                    models.CharField(
                        blank=True, help_text="PCI address of the management function.", max_length=32, null=True
                    ),
                ),
                ("std_board_info", models.TextField(blank=True, default="")),
                ("vendor_board_info", models.TextField(blank=True, default="")),
                ("numa_node", models.IntegerField(default=-1, help_text="NUMA node; -1 if unknown.")),
                ("kernel_driver", models.CharField(blank=True, default="", max_length=64)),
                (
                    "to_install",
                    models.TextField(
                        blank=True,
                        default="",
                        help_text="The steps by which its driver would make it ready, one per line.",
                    ),
                ),
                (
                    "acts",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="The commands that its driver supports for it.",
                        max_length=255,
                    ),
                ),
                (
                    "changeable",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="The settings of a layout that its driver accepts.",
                        max_length=255,
                    ),
                ),
                (
                    "sized_by",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="The setting of a layout that determines the number of handles.",
                        max_length=64,
                    ),
                ),
                (
                    "backend",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="The backend of its driver that found it.",
                        max_length=64,
                    ),
                ),
                (
                    "bridges",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="The PCI bridges above it, starting at the root.",
                        max_length=255,
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[("ok", "ok"), ("degraded", "degraded"), ("failed", "failed"), ("unknown", "unknown")],
                        default="unknown",
                        max_length=16,
                    ),
                ),
                ("status_reason", models.TextField(blank=True, default="")),
                ("status_since", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("inactive", "inactive"),
                            ("installing", "installing"),
                            ("ready", "ready"),
                            ("maintenance", "maintenance"),
                            ("failed", "failed"),
                            ("quarantined", "quarantined"),
                            ("missing", "missing"),
                            ("retired", "retired"),
                        ],
                        default="inactive",
                        max_length=16,
                    ),
                ),
                ("state_reason", models.TextField(blank=True, default="found by its driver")),
                ("state_since", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("state_by", models.CharField(db_collation="C", default="agent", max_length=255)),
                (
                    "returns_to",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("inactive", "inactive"),
                            ("installing", "installing"),
                            ("ready", "ready"),
                            ("maintenance", "maintenance"),
                            ("failed", "failed"),
                            ("quarantined", "quarantined"),
                            ("missing", "missing"),
                            ("retired", "retired"),
                        ],
                        help_text="The state that a missing device returns to when it is found again.",
                        max_length=16,
                        null=True,
                    ),
                ),
                (
                    "drain_to",
                    models.CharField(
                        blank=True,
                        choices=[("maintenance", "maintenance"), ("retired", "retired")],
                        help_text="While it drains: its state once its last request is gone.",
                        max_length=16,
                        null=True,
                    ),
                ),
                (
                    "busy_with",
                    models.UUIDField(
                        blank=True,
                        help_text="The exclusive command in progress; meanwhile the device is not bound.",
                        null=True,
                    ),
                ),
                (
                    "generation",
                    models.BigIntegerField(
                        db_default=0,
                        default=0,
                        help_text="Increases with every exclusive command, and when its attach handles change.",
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="DeviceProfile",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("name", models.CharField(db_collation="C", max_length=255, unique=True)),
                ("description", models.TextField(blank=True, null=True)),
                ("groups", accelerators.models.fields.KeptJson()),
            ],
            options={
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="Generation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("collection", models.CharField(db_collation="C", db_index=True, max_length=16)),
                ("value", models.BigIntegerField(default=0)),
            ],
            options={
                "db_table": "generation",
            },
        ),
        migrations.CreateModel(
            name="Host",
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
                        help_text="The name of the compute provider in Placement; `hostname` in the v2 API.",
                        max_length=255,
                        unique=True,
                    ),
                ),
                (
                    "node",
                    models.CharField(
                        db_collation="C",
                        help_text="The names of deployables and providers begin with it.",
                        max_length=255,
                    ),
                ),
                (
                    "stale_since",
                    models.DateTimeField(
                        help_text="Since when its agent has sent no heartbeat; empty if it is live.", null=True
                    ),
                ),
                ("reported_at", models.DateTimeField(help_text="When its last report was applied.", null=True)),
                (
                    "applied_hash",
                    models.CharField(default="", help_text="Hash of the last applied report.", max_length=64),
                ),
                ("applied_epoch", models.BigIntegerField(default=0)),
                ("applied_seq", models.BigIntegerField(default=0)),
                (
                    "drivers",
                    models.JSONField(
                        default=dict,
                        help_text="Per driver: error (empty when it answered), since when, its number of devices, its faults, and its backends by name, each with error, since when, and services.",
                    ),
                ),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="Tick",
            fields=[
                ("name", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "db_table": "tick",
            },
        ),
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
                        help_text="Letters, digits and the characters . - _ are allowed.",
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
                        help_text="Rules are tried in this order, lowest number first.",
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
                        help_text="Name of the host, with the wildcards * and ?.",
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
                        help_text="The vendor as the driver reports it, for example 10de.",
                        max_length=255,
                    ),
                ),
                (
                    "model",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        default="",
                        help_text="Model or product, with the wildcards * and ?.",
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
                        help_text="The state that a matching device gets.",
                        max_length=16,
                    ),
                ),
                ("enabled", models.BooleanField(default=True)),
            ],
            options={
                "ordering": ["order", "id"],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("action__in", ["ready", "inactive", "quarantined"])),
                        name="rule_action_known",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("type__in", ["", "GPU", "FPGA", "AICHIP", "QAT", "NIC", "SSD"])),
                        name="rule_type_known",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Attachment",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("instance", models.UUIDField()),
                ("project_id", models.CharField(db_collation="C", help_text="The instance's project.", max_length=255)),
                (
                    "host",
                    models.CharField(
                        db_collation="C", help_text="The host on which the instance runs.", max_length=255
                    ),
                ),
                (
                    "profile",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        default="",
                        help_text="The requested device profile; empty if a device was requested.",
                        max_length=255,
                    ),
                ),
                ("device", models.UUIDField(blank=True, help_text="The requested device.", null=True)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("asked", "asked"),
                            ("attaching", "attaching"),
                            ("attached", "attached"),
                            ("undoing", "undoing"),
                            ("failed", "failed"),
                            ("detaching", "detaching"),
                            ("detached", "detached"),
                        ],
                        default="asked",
                        max_length=16,
                    ),
                ),
                ("step", models.CharField(blank=True, default="", max_length=16)),
                ("steps", models.JSONField(default=list, help_text="The steps that were done: step, at, text.")),
                (
                    "requests",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.UUIDField(),
                        default=list,
                        help_text="The accelerator requests that were created for it, in order.",
                        size=None,
                    ),
                ),
                (
                    "providers",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.UUIDField(),
                        default=list,
                        help_text="For each request: where it is bound.",
                        size=None,
                    ),
                ),
                (
                    "shares",
                    models.JSONField(default=dict, help_text="The claimed resources: provider → class and amount."),
                ),
                (
                    "claim",
                    models.JSONField(
                        help_text="The last write to Placement that claims resources, stored before it is tried.",
                        null=True,
                    ),
                ),
                (
                    "release",
                    models.JSONField(
                        help_text="The last write to Placement that releases resources, stored before it is tried.",
                        null=True,
                    ),
                ),
                ("fault", models.TextField(blank=True, default="", help_text="Why it failed, or what blocks it.")),
                ("actor", models.CharField(db_collation="C", max_length=255)),
                ("reason", models.TextField(blank=True, default="")),
                ("request_id", models.CharField(blank=True, default="", max_length=64)),
                ("attached_at", models.DateTimeField(blank=True, null=True)),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "ordering": ["-id"],
                "indexes": [
                    models.Index(fields=["instance", "-id"], name="attachment_instance"),
                    models.Index(condition=models.Q(("state", "attached")), fields=["id"], name="attachment_attached"),
                    models.Index(
                        condition=models.Q(("ended_at__isnull", False)), fields=["ended_at"], name="attachment_ended"
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            (
                                "state__in",
                                ["asked", "attaching", "attached", "undoing", "failed", "detaching", "detached"],
                            )
                        ),
                        name="attachment_state_known",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Bulk",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("action", models.CharField(db_collation="C", help_text="The action for each device.", max_length=16)),
                (
                    "then",
                    models.CharField(
                        choices=[("maintenance", "maintenance"), ("retired", "retired")],
                        default="maintenance",
                        max_length=16,
                    ),
                ),
                (
                    "selection",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="The filters of the list when the devices were selected.",
                        max_length=1000,
                    ),
                ),
                ("total", models.IntegerField(default=0)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("draft", "draft"),
                            ("running", "running"),
                            ("done", "done"),
                            ("cancelled", "cancelled"),
                        ],
                        default="draft",
                        max_length=16,
                    ),
                ),
                (
                    "dry",
                    models.BooleanField(
                        default=False, help_text="The run in progress is a dry run, which changes nothing."
                    ),
                ),
                (
                    "held_too",
                    models.BooleanField(default=False, help_text="The confirmation includes devices that are held."),
                ),
                ("actor", models.CharField(db_collation="C", max_length=255)),
                ("reason", models.TextField(blank=True, default="")),
                ("request_id", models.CharField(blank=True, default="", max_length=64)),
                ("started_at", models.DateTimeField(blank=True, null=True)),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                ("moved", models.IntegerField(default=0)),
                ("unchanged", models.IntegerField(default=0)),
                ("refused", models.IntegerField(default=0)),
            ],
            options={
                "verbose_name": "bulk action",
                "ordering": ["-id"],
                "indexes": [
                    models.Index(condition=models.Q(("state", "running")), fields=["updated_at"], name="bulk_under_way")
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("state__in", ["draft", "running", "done", "cancelled"])),
                        name="bulk_state_known",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Deployable",
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
                    models.CharField(db_collation="C", help_text="The provider's name in Placement.", max_length=255),
                ),
                ("num_accelerators", models.IntegerField()),
                ("driver_name", models.CharField(blank=True, default="", max_length=100)),
                ("rp_uuid", models.UUIDField(blank=True, db_index=True, null=True)),
                ("bitstream_id", models.UUIDField(blank=True, null=True)),
                ("missing_since", models.DateTimeField(blank=True, null=True)),
                (
                    "parent",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="children",
                        to="accelerators.deployable",
                    ),
                ),
                (
                    "root",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="accelerators.deployable",
                    ),
                ),
                (
                    "device",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="deployables",
                        to="accelerators.device",
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="AttachHandle",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                (
                    "attach_type",
                    models.CharField(
                        choices=[("PCI", "PCI"), ("MDEV", "MDEV"), ("TEST_PCI", "TEST_PCI"), ("DEV", "DEV")],
                        max_length=16,
                    ),
                ),
                (
                    "attach_info",
                    models.CharField(db_collation="C", help_text="JSON; its bytes are its identity.", max_length=255),
                ),
                ("missing_since", models.DateTimeField(blank=True, null=True)),
                (
                    "deployable",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="attach_handles",
                        to="accelerators.deployable",
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
            },
        ),
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
                    models.JSONField(
                        default=dict,
                        help_text="The arguments as they are sent to the agent: driver, key, handle, layout …",
                    ),
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
                (
                    "start_by",
                    models.DateTimeField(help_text="If the agent has not accepted the command by then, it expires."),
                ),
                (
                    "end_by",
                    models.DateTimeField(help_text="If the agent has not answered by then, the outcome is unknown."),
                ),
                ("taken_at", models.DateTimeField(blank=True, null=True)),
                ("started_at", models.DateTimeField(blank=True, null=True)),
                ("percent", models.IntegerField(default=0)),
                ("progress", models.CharField(blank=True, default="", max_length=500)),
                ("answered_at", models.DateTimeField(blank=True, null=True)),
                (
                    "outcome",
                    models.CharField(
                        blank=True, default="", help_text="The outcome that the agent reported.", max_length=16
                    ),
                ),
                ("text", models.TextField(blank=True, default="", help_text="The outcome as a sentence.")),
                ("detail", models.JSONField(default=dict)),
                ("report_epoch", models.BigIntegerField(default=0)),
                ("report_seq", models.BigIntegerField(default=0)),
                ("report_hash", models.CharField(blank=True, default="", max_length=64)),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                (
                    "device",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="commands",
                        to="accelerators.device",
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="commands", to="accelerators.host"
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
            },
        ),
        migrations.CreateModel(
            name="BulkItem",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("device_uuid", models.UUIDField()),
                ("device_name", models.CharField(db_collation="C", max_length=255)),
                ("host", models.CharField(db_collation="C", max_length=255)),
                (
                    "stood",
                    models.CharField(help_text="The device's state when the devices were selected.", max_length=64),
                ),
                (
                    "outcome",
                    models.CharField(
                        blank=True,
                        choices=[("moved", "moved"), ("unchanged", "unchanged"), ("refused", "refused")],
                        default="",
                        help_text="The outcome; empty until the device was processed.",
                        max_length=16,
                    ),
                ),
                ("why", models.CharField(blank=True, default="", help_text="The code of the refusal.", max_length=16)),
                (
                    "state",
                    models.CharField(blank=True, default="", help_text="The device's state afterwards.", max_length=16),
                ),
                ("text", models.TextField(blank=True, default="")),
                (
                    "bulk",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="items", to="accelerators.bulk"
                    ),
                ),
                (
                    "device",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accelerators.device",
                    ),
                ),
            ],
            options={
                "verbose_name": "device of a bulk action",
                "verbose_name_plural": "devices of bulk actions",
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="AcceleratorRequest",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("project_id", models.CharField(db_collation="C", db_index=True, max_length=255)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("Initial", "Initial"),
                            ("BindStarted", "BindStarted"),
                            ("Bound", "Bound"),
                            ("BindFailed", "BindFailed"),
                            ("Unbound", "Unbound"),
                        ],
                        default="Initial",
                        max_length=16,
                    ),
                ),
                ("group_id", models.IntegerField(default=0)),
                ("group", models.JSONField()),
                ("hostname", models.CharField(blank=True, max_length=255, null=True)),
                ("device_rp_uuid", models.UUIDField(blank=True, null=True)),
                ("instance_uuid", models.UUIDField(blank=True, db_index=True, null=True)),
                (
                    "deadline",
                    models.DateTimeField(blank=True, help_text="When BindStarted becomes BindFailed.", null=True),
                ),
                ("fault", models.TextField(blank=True, default="", help_text="Why the bind failed.")),
                (
                    "label",
                    models.CharField(
                        blank=True, default="", help_text="A label that its project has chosen.", max_length=255
                    ),
                ),
                (
                    "attach_handle",
                    models.OneToOneField(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="request",
                        to="accelerators.attachhandle",
                    ),
                ),
                (
                    "deployable",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="requests",
                        to="accelerators.deployable",
                    ),
                ),
                (
                    "profile",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="requests",
                        to="accelerators.deviceprofile",
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
            },
        ),
        migrations.SeparateDatabaseAndState(
            database_operations=[run_file("events")],
            state_operations=[
                migrations.CreateModel(
                    name="Event",
                    fields=[
                        (
                            "id",
                            models.BigAutoField(
                                auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                            ),
                        ),
                        ("at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                        (
                            "source",
                            models.CharField(
                                choices=[
                                    ("person", "person"),
                                    ("agent", "agent"),
                                    ("api", "api"),
                                    ("rule", "rule"),
                                    ("system", "system"),
                                ],
                                max_length=8,
                            ),
                        ),
                        (
                            "actor",
                            models.CharField(
                                db_collation="C",
                                help_text="The person, the host of the agent, or the rule.",
                                max_length=255,
                            ),
                        ),
                        ("request_id", models.CharField(blank=True, default="", max_length=64)),
                        ("action", models.CharField(db_collation="C", max_length=64)),
                        ("subject_type", models.CharField(max_length=32)),
                        ("subject", models.UUIDField(blank=True, null=True)),
                        ("subject_name", models.CharField(blank=True, db_collation="C", default="", max_length=255)),
                        ("host", models.CharField(blank=True, db_collation="C", default="", max_length=255)),
                        ("changes", models.JSONField(default=dict, help_text="For each field: [before, after].")),
                        ("reason", models.TextField(blank=True, default="")),
                        (
                            "tx",
                            models.BigIntegerField(
                                db_default=models.Func(function="accelerators_event_tx"),
                                editable=False,
                                help_text="The database transaction that wrote it.",
                            ),
                        ),
                    ],
                    options={
                        "ordering": ["-at", "-id"],
                        "indexes": [
                            models.Index(fields=["-at", "-id"], name="event_newest_first"),
                            models.Index(fields=["subject", "-at"], name="event_subject"),
                            models.Index(fields=["host", "-at"], name="event_host"),
                        ],
                        "constraints": [
                            models.CheckConstraint(
                                condition=models.Q(("source__in", ["person", "agent", "api", "rule", "system"])),
                                name="event_source_known",
                            )
                        ],
                    },
                ),
            ],
        ),
        migrations.CreateModel(
            name="DriverWish",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("driver", models.CharField(db_collation="C", max_length=64)),
                ("installed", models.BooleanField(default=True)),
                ("enabled", models.BooleanField(default=True)),
                ("settings", models.JSONField(help_text="Null: the settings of the host's own file apply.", null=True)),
                ("generation", models.BigIntegerField(default=1)),
                ("actor", models.CharField(db_collation="C", max_length=255)),
                ("reason", models.TextField(blank=True, default="")),
                (
                    "command",
                    models.ForeignKey(
                        db_constraint=False,
                        help_text="Which told it last.",
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accelerators.command",
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="wishes", to="accelerators.host"
                    ),
                ),
            ],
            options={
                "verbose_name": "wanted driver",
                "ordering": ["host", "driver"],
            },
        ),
        migrations.AddField(
            model_name="device",
            name="host",
            field=models.ForeignKey(
                db_index=False,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="devices",
                to="accelerators.host",
            ),
        ),
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
                    models.JSONField(default=dict, help_text="Properties as in Glance: accel:function_id …"),
                ),
                ("source", models.CharField(choices=[("glance", "glance"), ("upload", "upload")], max_length=8)),
                ("by", models.CharField(db_collation="C", default="", help_text="Who uploaded it.", max_length=255)),
                (
                    "used_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="When a command last used it.",
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
                "indexes": [
                    models.Index(
                        condition=models.Q(("source", "glance")), fields=["used_at"], name="image_longest_unused"
                    )
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("source__in", ["glance", "upload"])), name="image_source_known"
                    ),
                    models.CheckConstraint(condition=models.Q(("size__gte", 0)), name="image_size_not_negative"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Intent",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("kind", models.CharField(db_collation="C", max_length=32)),
                ("key", models.CharField(db_collation="C", max_length=255)),
                ("payload", models.JSONField(default=dict)),
                ("attempts", models.IntegerField(default=0)),
                ("next_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("last_error", models.TextField(blank=True, default="")),
            ],
            options={
                "ordering": ["id"],
                "indexes": [models.Index(fields=["next_at"], name="intent_next")],
                "constraints": [models.UniqueConstraint(fields=("kind", "key"), name="intent_one_per_kind_and_key")],
            },
        ),
        migrations.CreateModel(
            name="Rollout",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                (
                    "op",
                    models.CharField(
                        choices=[("install", "install"), ("update", "update"), ("uninstall", "uninstall")],
                        max_length=16,
                    ),
                ),
                ("driver", models.CharField(db_collation="C", max_length=64)),
                (
                    "enabled",
                    models.BooleanField(help_text="Null: unchanged; a newly installed driver is enabled.", null=True),
                ),
                ("settings", models.JSONField(help_text="Null: the settings stay unchanged.", null=True)),
                ("selection", models.CharField(default="", help_text="How the hosts were selected.", max_length=1000)),
                ("max_parallel", models.IntegerField(default=5)),
                ("stop_on_failure", models.BooleanField(default=True)),
                ("total", models.IntegerField(default=0)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("running", "running"),
                            ("done", "done"),
                            ("stopped", "stopped"),
                            ("cancelled", "cancelled"),
                        ],
                        default="running",
                        max_length=16,
                    ),
                ),
                ("actor", models.CharField(db_collation="C", max_length=255)),
                (
                    "source",
                    models.CharField(
                        choices=[
                            ("person", "person"),
                            ("agent", "agent"),
                            ("api", "api"),
                            ("rule", "rule"),
                            ("system", "system"),
                        ],
                        max_length=16,
                    ),
                ),
                ("reason", models.TextField(blank=True, default="")),
                ("request_id", models.CharField(blank=True, default="", max_length=64)),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "verbose_name": "driver rollout",
                "ordering": ["-id"],
                "indexes": [
                    models.Index(
                        condition=models.Q(("ended_at__isnull", True)), fields=["id"], name="rollout_under_way"
                    )
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("state__in", ["running", "done", "stopped", "cancelled"])),
                        name="rollout_state_known",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="RolloutStep",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("host_name", models.CharField(db_collation="C", max_length=255)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("waiting", "waiting"),
                            ("ordered", "ordered"),
                            ("done", "done"),
                            ("failed", "failed"),
                            ("skipped", "skipped"),
                        ],
                        default="waiting",
                        max_length=16,
                    ),
                ),
                ("text", models.TextField(blank=True, default="")),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                (
                    "command",
                    models.ForeignKey(
                        db_constraint=False,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accelerators.command",
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accelerators.host",
                    ),
                ),
                (
                    "rollout",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="steps", to="accelerators.rollout"
                    ),
                ),
            ],
            options={
                "verbose_name": "host of a driver rollout",
                "verbose_name_plural": "hosts of driver rollouts",
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="Seal",
            fields=[
                ("number", models.BigIntegerField(primary_key=True, serialize=False)),
                (
                    "month",
                    models.CharField(
                        db_collation="C",
                        help_text="The month of its events; a seal covers events of one month only.",
                        max_length=7,
                    ),
                ),
                ("tx", models.BigIntegerField(help_text="The transaction of its last event.")),
                ("event", models.BigIntegerField(help_text="Its last event in the order of transaction and id.")),
                ("events", models.IntegerField(help_text="The number of events that it covers.")),
                ("digest", models.CharField(db_collation="C", help_text="Hash over all its events.", max_length=64)),
                (
                    "drops",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        default="",
                        help_text="The month whose events were dropped when this seal was made.",
                        max_length=7,
                    ),
                ),
                ("sealed_at", models.DateTimeField()),
                (
                    "hash",
                    models.CharField(
                        db_collation="C",
                        help_text="Hash over this seal's fields and the hash of the previous seal.",
                        max_length=64,
                    ),
                ),
                (
                    "marks",
                    models.BinaryField(
                        default=b"", help_text="Four bytes for each event, by which a changed event is found."
                    ),
                ),
            ],
            options={
                "ordering": ["-number"],
                "indexes": [models.Index(fields=["tx", "event"], name="seal_last")],
            },
        ),
        migrations.CreateModel(
            name="Attribute",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("key", models.CharField(db_collation="C", max_length=255)),
                ("value", models.TextField()),
                (
                    "origin",
                    models.CharField(
                        choices=[("agent", "agent"), ("operator", "operator"), ("conductor", "conductor")],
                        default="agent",
                        max_length=16,
                    ),
                ),
                (
                    "deployable",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="attributes",
                        to="accelerators.deployable",
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
                "constraints": [
                    models.UniqueConstraint(fields=("deployable", "key"), name="attribute_one_per_deployable_and_key"),
                    models.CheckConstraint(
                        condition=models.Q(("origin__in", ["agent", "operator", "conductor"])),
                        name="attribute_origin_known",
                    ),
                ],
            },
        ),
        migrations.AddIndex(
            model_name="attachhandle",
            index=models.Index(fields=["attach_info"], name="handle_info"),
        ),
        migrations.AddConstraint(
            model_name="attachhandle",
            constraint=models.UniqueConstraint(
                fields=("deployable", "attach_info"), name="handle_one_per_deployable_and_info"
            ),
        ),
        migrations.AddConstraint(
            model_name="attachhandle",
            constraint=models.CheckConstraint(
                condition=models.Q(("attach_type__in", ["PCI", "MDEV", "TEST_PCI", "DEV"])), name="handle_type_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="deployable",
            constraint=models.UniqueConstraint(fields=("device", "name"), name="deployable_one_per_device_and_name"),
        ),
        migrations.AddConstraint(
            model_name="deployable",
            constraint=models.CheckConstraint(
                condition=models.Q(("num_accelerators__gte", 0)), name="deployable_count_not_negative"
            ),
        ),
        migrations.AddIndex(
            model_name="bulkitem",
            index=models.Index(condition=models.Q(("outcome", "")), fields=["bulk", "id"], name="bulk_item_waiting"),
        ),
        migrations.AddIndex(
            model_name="bulkitem",
            index=models.Index(fields=["bulk", "outcome", "id"], name="bulk_item_outcome"),
        ),
        migrations.AddIndex(
            model_name="acceleratorrequest",
            index=models.Index(
                condition=models.Q(("state", "BindStarted")), fields=["deadline"], name="request_deadline"
            ),
        ),
        migrations.AddConstraint(
            model_name="acceleratorrequest",
            constraint=models.CheckConstraint(
                condition=models.Q(("state__in", ["Initial", "BindStarted", "Bound", "BindFailed", "Unbound"])),
                name="request_state_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="acceleratorrequest",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("state", "Bound"), _negated=True), ("attach_handle__isnull", False), _connector="OR"
                ),
                name="request_bound_holds_a_handle",
            ),
        ),
        migrations.AddConstraint(
            model_name="acceleratorrequest",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("state__in", ["BindStarted", "Bound"]), ("attach_handle__isnull", True), _connector="OR"
                ),
                name="request_handle_only_while_binding_or_bound",
            ),
        ),
        migrations.AddConstraint(
            model_name="acceleratorrequest",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("state", "BindStarted"), _negated=True), ("deadline__isnull", False), _connector="OR"
                ),
                name="request_bind_has_a_deadline",
            ),
        ),
        migrations.AddConstraint(
            model_name="driverwish",
            constraint=models.UniqueConstraint(fields=("host", "driver"), name="driver_wish_one_per_host"),
        ),
        migrations.AddIndex(
            model_name="device",
            index=models.Index(fields=["state", "type"], name="device_state_type"),
        ),
        migrations.AddIndex(
            model_name="device",
            index=models.Index(fields=["type", "vendor"], name="device_type_vendor"),
        ),
        migrations.AddIndex(
            model_name="device",
            index=models.Index(condition=models.Q(("drain_to__isnull", False)), fields=["id"], name="device_draining"),
        ),
        migrations.AddIndex(
            model_name="device",
            index=models.Index(
                condition=models.Q(("status__in", ("degraded", "failed"))), fields=["status"], name="device_unwell"
            ),
        ),
        migrations.AddIndex(
            model_name="device",
            index=models.Index(fields=["address"], name="device_address"),
        ),
        migrations.AddIndex(
            model_name="device",
            index=models.Index(fields=["key"], name="device_key"),
        ),
        migrations.AddConstraint(
            model_name="device",
            constraint=models.UniqueConstraint(fields=("host", "key"), name="device_one_per_host_and_key"),
        ),
        migrations.AddConstraint(
            model_name="device",
            constraint=models.CheckConstraint(
                condition=models.Q(("type__in", ["GPU", "FPGA", "AICHIP", "QAT", "NIC", "SSD"])),
                name="device_type_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="device",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    (
                        "state__in",
                        [
                            "inactive",
                            "installing",
                            "ready",
                            "maintenance",
                            "failed",
                            "quarantined",
                            "missing",
                            "retired",
                        ],
                    )
                ),
                name="device_state_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="device",
            constraint=models.CheckConstraint(
                condition=models.Q(("status__in", ["ok", "degraded", "failed", "unknown"])), name="device_status_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="device",
            constraint=models.CheckConstraint(
                condition=models.Q(("state", "missing"), ("returns_to__isnull", True), _connector="OR"),
                name="device_returns_only_from_missing",
            ),
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
        migrations.AddIndex(
            model_name="rolloutstep",
            index=models.Index(
                condition=models.Q(("state__in", ["waiting", "ordered"])),
                fields=["rollout", "id"],
                name="rollout_step_open",
            ),
        ),
        migrations.AddConstraint(
            model_name="rolloutstep",
            constraint=models.CheckConstraint(
                condition=models.Q(("state__in", ["waiting", "ordered", "done", "failed", "skipped"])),
                name="rollout_step_state_known",
            ),
        ),
        run_file("seals"),
        run_file("generations"),
        run_file("backends"),
        run_file("host_drivers"),
    ]
