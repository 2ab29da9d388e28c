"""Store the providers of others below each compute provider, and discrepancies about them, which name no instance."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0008_audit_status_and_pauses"),
        ("placement_sync", "0003_vanished_listed"),
    ]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.RemoveConstraint(model_name="discrepancy", name="discrepancy_once"),
        migrations.RemoveConstraint(model_name="discrepancy", name="discrepancy_kind_known"),
        migrations.AddField(
            model_name="tree",
            name="foreign",
            field=models.JSONField(
                db_default=[],
                default=list,
                help_text="The providers of others below the compute provider, as last seen.",
            ),
        ),
        migrations.AlterField(
            model_name="discrepancy",
            name="instance",
            field=models.UUIDField(
                blank=True,
                help_text="The instance or other consumer in Placement; null: it is about the provider.",
                null=True,
            ),
        ),
        migrations.AlterField(
            model_name="discrepancy",
            name="kind",
            field=models.CharField(
                choices=[
                    ("unclaimed", "attached but unclaimed"),
                    ("unattached", "claimed but not attached"),
                    ("without_device", "instance without its device"),
                    ("foreign", "provider of somebody else"),
                ],
                max_length=16,
            ),
        ),
        migrations.AddConstraint(
            model_name="discrepancy",
            constraint=models.UniqueConstraint(
                fields=("kind", "provider", "instance"), name="discrepancy_once", nulls_distinct=False
            ),
        ),
        migrations.AddConstraint(
            model_name="discrepancy",
            constraint=models.CheckConstraint(
                condition=models.Q(("kind__in", ["unclaimed", "unattached", "without_device", "foreign"])),
                name="discrepancy_kind_known",
            ),
        ),
    ]
