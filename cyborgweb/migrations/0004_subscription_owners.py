"""Record the owner of each subscription, and end subscriptions instead of deleting them with their user. Remember
projects whose webhooks were slow."""

import django.db.models.deletion
import django.db.models.functions.datetime
from django.conf import settings
from django.db import migrations, models

FILL_OWNERS = """
UPDATE cyborgweb_subscription s SET owner = CASE WHEN s.person <> '' THEN s.person
  ELSE coalesce((SELECT k.keystone_id FROM cyborgweb_keystoneuser k WHERE k.user_id = s.user_id), s.user_id::text, '')
  END
"""
LINK_USERS = """
UPDATE cyborgweb_subscription s SET user_id = k.user_id
FROM cyborgweb_keystoneuser k WHERE k.keystone_id = s.owner AND s.user_id IS NULL
"""


class Migration(migrations.Migration):
    dependencies = [
        ("cyborgweb", "0003_mail_confirmations"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.CreateModel(
            name="SlowProject",
            fields=[
                ("project_id", models.CharField(db_collation="C", max_length=255, primary_key=True, serialize=False)),
                ("times", models.IntegerField(default=1, help_text="How many times it was slow, after one another.")),
                ("slow_until", models.DateTimeField()),
            ],
            options={"default_permissions": ()},
        ),
        migrations.RemoveConstraint(model_name="subscription", name="subscription_standing_known"),
        migrations.AddField(
            model_name="subscription",
            name="owner",
            field=models.CharField(
                blank=True,
                db_collation="C",
                db_default="",
                default="",
                editable=False,
                help_text="The id of the person whose rights it needs: who created it, or to whom it was handed over.",
                max_length=255,
            ),
        ),
        migrations.AddField(
            model_name="subscription",
            name="owner_check_at",
            field=models.DateTimeField(
                db_default=django.db.models.functions.datetime.Now(),
                editable=False,
                help_text="When Keystone is asked about its owner next.",
            ),
        ),
        migrations.AddField(
            model_name="subscription",
            name="owner_confirmed_at",
            field=models.DateTimeField(
                db_default=django.db.models.functions.datetime.Now(),
                editable=False,
                help_text="When it was last confirmed that its owner has these rights.",
            ),
        ),
        migrations.AddField(
            model_name="subscription",
            name="owner_doubt",
            field=models.TextField(
                blank=True,
                db_default="",
                default="",
                editable=False,
                help_text="Why the rights of its owner could not be confirmed; empty if they were.",
            ),
        ),
        migrations.RunSQL(FILL_OWNERS, migrations.RunSQL.noop),
        migrations.RunSQL(LINK_USERS, migrations.RunSQL.noop),
        migrations.AlterField(
            model_name="subscription",
            name="standing",
            field=models.CharField(
                choices=[
                    ("active", "active"),
                    ("off", "off"),
                    ("paused", "paused"),
                    ("gone", "gone"),
                    ("ended", "ended"),
                ],
                default="active",
                help_text=(
                    "Paused: its destination failed for days. Gone: it answered 410. Ended: its owner may not have it."
                ),
                max_length=8,
            ),
        ),
        migrations.AlterField(
            model_name="subscription",
            name="user",
            field=models.ForeignKey(
                blank=True,
                help_text="The user of its owner, if the owner has one here; it ends when this user is deleted.",
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="subscriptions",
                to=settings.AUTH_USER_MODEL,
            ),
        ),
        migrations.AddConstraint(
            model_name="subscription",
            constraint=models.CheckConstraint(
                condition=models.Q(("standing__in", ["active", "off", "paused", "gone", "ended"])),
                name="subscription_standing_known",
            ),
        ),
    ]
