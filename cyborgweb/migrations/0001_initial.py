"""Users, saved views, subscriptions and their deliveries, and maintenance."""

import uuid

import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.functions.datetime
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Reader",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("transaction", models.BigIntegerField(default=0)),
                ("event", models.BigIntegerField(default=0)),
                ("since", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="ApiToken",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=255)),
                ("token_hash", models.CharField(max_length=64, unique=True)),
                (
                    "roles",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(max_length=64), default=list, size=None
                    ),
                ),
                ("project_id", models.CharField(blank=True, default="", max_length=64)),
                ("created_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="api_tokens",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "verbose_name": "API token",
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="KeystoneUser",
            fields=[
                ("keystone_id", models.CharField(max_length=64, primary_key=True, serialize=False)),
                (
                    "user",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="keystone",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Maintenance",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "since",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="Since when the service is read-only.",
                    ),
                ),
                ("by", models.CharField(help_text="Who made the service read-only.", max_length=255)),
                (
                    "reason",
                    models.CharField(
                        blank=True,
                        help_text="The reason, which is shown to everybody whose change is refused.",
                        max_length=4096,
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "maintenance",
                "constraints": [models.CheckConstraint(condition=models.Q(("id", 1)), name="maintenance_is_one")],
            },
        ),
        migrations.CreateModel(
            name="Subscription",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("updated_at", models.DateTimeField(editable=False, null=True)),
                ("name", models.CharField(help_text="A name of your choice.", max_length=64)),
                (
                    "project_id",
                    models.CharField(
                        db_collation="C", help_text="The project in which it was created.", max_length=255
                    ),
                ),
                (
                    "person",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        default="",
                        help_text="The id of the person it belongs to; empty if it belongs to the project.",
                        max_length=255,
                    ),
                ),
                (
                    "scope",
                    models.CharField(
                        choices=[("project", "project"), ("cloud", "cloud")],
                        default="project",
                        help_text="The requests of the project and the devices they hold, or the whole cloud.",
                        max_length=8,
                    ),
                ),
                (
                    "kinds",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(
                            choices=[
                                ("request.bound", "request.bound"),
                                ("request.failed", "request.failed"),
                                ("request.unbound", "request.unbound"),
                                ("device.ready", "device.ready"),
                                ("device.failed", "device.failed"),
                                ("device.missing", "device.missing"),
                                ("device.quarantined", "device.quarantined"),
                                ("device.health", "device.health"),
                            ],
                            max_length=32,
                        ),
                        help_text="The kinds of events that you want to hear about.",
                        size=None,
                    ),
                ),
                (
                    "host",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        default="",
                        help_text="Only this host, with the wildcards * and ?. For the scope cloud only.",
                        max_length=255,
                    ),
                ),
                (
                    "type",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("", "any"),
                            ("GPU", "GPU"),
                            ("FPGA", "FPGA"),
                            ("AICHIP", "AICHIP"),
                            ("QAT", "QAT"),
                            ("NIC", "NIC"),
                            ("SSD", "SSD"),
                        ],
                        default="",
                        help_text="Only devices of this type.",
                        max_length=16,
                    ),
                ),
                (
                    "label",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="Only requests with exactly this label.",
                        max_length=255,
                    ),
                ),
                (
                    "way",
                    models.CharField(
                        choices=[("webhook", "webhook"), ("email", "email"), ("inbox", "inbox")],
                        help_text="How messages are delivered.",
                        max_length=8,
                    ),
                ),
                (
                    "target",
                    models.CharField(
                        blank=True, default="", help_text="The webhook's URL, or the e-mail address.", max_length=2000
                    ),
                ),
                (
                    "secret",
                    models.TextField(
                        blank=True,
                        default="",
                        editable=False,
                        help_text="The secret that signs webhooks; stored encrypted.",
                    ),
                ),
                (
                    "standing",
                    models.CharField(
                        choices=[("active", "active"), ("off", "off"), ("paused", "paused"), ("gone", "gone")],
                        default="active",
                        help_text="Paused: its destination failed for days. Gone: it answered 410.",
                        max_length=8,
                    ),
                ),
                ("last_error", models.TextField(blank=True, default="", help_text="The error of the last attempt.")),
                ("failures", models.IntegerField(default=0, help_text="Failed attempts since the last success.")),
                (
                    "failing_since",
                    models.DateTimeField(blank=True, help_text="Since when attempts have failed.", null=True),
                ),
                (
                    "retry_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="No attempt is made before this time.",
                    ),
                ),
                (
                    "user",
                    models.ForeignKey(
                        blank=True,
                        help_text="Who created it; it is deleted with this user.",
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="subscriptions",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="Delivery",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "message",
                    models.UUIDField(
                        default=uuid.uuid4,
                        editable=False,
                        help_text="The same at every attempt, so that receivers recognise repetitions.",
                        unique=True,
                    ),
                ),
                (
                    "event",
                    models.BigIntegerField(blank=True, help_text="The number of the event that it reports.", null=True),
                ),
                ("kind", models.CharField(help_text="The kind of event.", max_length=32)),
                (
                    "at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(), help_text="When the event happened."
                    ),
                ),
                ("data", models.JSONField(default=dict, help_text="The data of the message, as it is sent.")),
                (
                    "progress",
                    models.CharField(
                        choices=[("waiting", "waiting"), ("delivered", "delivered"), ("given up", "given up")],
                        default="waiting",
                        help_text="The progress of the delivery.",
                        max_length=16,
                    ),
                ),
                ("attempts", models.IntegerField(db_default=0, default=0, help_text="The number of attempts.")),
                (
                    "next_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(), help_text="When the next attempt is made."
                    ),
                ),
                (
                    "last_error",
                    models.TextField(blank=True, db_default="", default="", help_text="The error of the last attempt."),
                ),
                ("delivered_at", models.DateTimeField(blank=True, help_text="When it was delivered.", null=True)),
                (
                    "reader",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        db_default="",
                        default="",
                        help_text="The id of the person in whose inbox it is; empty if in none.",
                        max_length=255,
                    ),
                ),
                (
                    "read_at",
                    models.DateTimeField(blank=True, help_text="When its reader marked it as read.", null=True),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(), help_text="When the message was created."
                    ),
                ),
                (
                    "subscription",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="deliveries",
                        to="cyborgweb.subscription",
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "deliveries",
                "ordering": ["-id"],
            },
        ),
        migrations.CreateModel(
            name="SavedView",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("of", models.CharField(help_text="The listed model: app.model.", max_length=100)),
                ("name", models.CharField(blank=True, max_length=64)),
                (
                    "query",
                    models.CharField(blank=True, help_text="The query string of the list's address.", max_length=2000),
                ),
                (
                    "columns",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(max_length=64), default=list, size=None
                    ),
                ),
                ("shared", models.BooleanField(default=False)),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="saved_views",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["name", "id"],
                "indexes": [models.Index(fields=["of"], name="saved_view_of")],
                "constraints": [models.UniqueConstraint(fields=("user", "of", "name"), name="saved_view_one_per_name")],
            },
        ),
        migrations.AddIndex(
            model_name="subscription",
            index=models.Index(fields=["project_id", "person"], name="subscription_owner"),
        ),
        migrations.AddConstraint(
            model_name="subscription",
            constraint=models.CheckConstraint(
                condition=models.Q(("scope__in", ["project", "cloud"])), name="subscription_scope_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="subscription",
            constraint=models.CheckConstraint(
                condition=models.Q(("way__in", ["webhook", "email", "inbox"])), name="subscription_way_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="subscription",
            constraint=models.CheckConstraint(
                condition=models.Q(("standing__in", ["active", "off", "paused", "gone"])),
                name="subscription_standing_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="subscription",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("way", "inbox"), _negated=True), models.Q(("person", ""), _negated=True), _connector="OR"
                ),
                name="subscription_inbox_has_a_person",
            ),
        ),
        migrations.AddIndex(
            model_name="delivery",
            index=models.Index(
                condition=models.Q(("progress", "waiting")), fields=["subscription", "next_at"], name="delivery_waiting"
            ),
        ),
        migrations.AddIndex(
            model_name="delivery",
            index=models.Index(fields=["subscription", "-id"], name="delivery_of"),
        ),
        migrations.AddIndex(
            model_name="delivery",
            index=models.Index(
                condition=models.Q(("reader", ""), _negated=True), fields=["reader", "-id"], name="delivery_inbox"
            ),
        ),
        migrations.AddIndex(
            model_name="delivery",
            index=models.Index(
                condition=models.Q(models.Q(("reader", ""), _negated=True), ("read_at__isnull", True)),
                fields=["reader"],
                name="delivery_unread",
            ),
        ),
        migrations.AddIndex(
            model_name="delivery",
            index=models.Index(fields=["created_at"], name="delivery_age"),
        ),
        migrations.AddConstraint(
            model_name="delivery",
            constraint=models.CheckConstraint(
                condition=models.Q(("progress__in", ["waiting", "delivered", "given up"])),
                name="delivery_progress_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="delivery",
            constraint=models.UniqueConstraint(fields=("subscription", "event"), name="delivery_one_per_event"),
        ),
    ]
