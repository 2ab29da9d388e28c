"""Indexes that began another, unique one are gone: every device that is found writes six entries fewer."""

from django.db import migrations, models
from django.db.models import deletion


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("accelerators", "0015_event_order")]
    operations = [
        migrations.RunSQL("SET lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.AlterField(
            model_name="device",
            name="host",
            field=models.ForeignKey(
                db_index=False, on_delete=deletion.PROTECT, related_name="devices", to="accelerators.host"
            ),
        ),
        migrations.AlterField(
            model_name="deployable",
            name="device",
            field=models.ForeignKey(
                db_index=False, on_delete=deletion.PROTECT, related_name="deployables", to="accelerators.device"
            ),
        ),
        migrations.AlterField(
            model_name="attribute",
            name="deployable",
            field=models.ForeignKey(
                db_index=False, on_delete=deletion.CASCADE, related_name="attributes", to="accelerators.deployable"
            ),
        ),
        migrations.AlterField(
            model_name="attachhandle",
            name="deployable",
            field=models.ForeignKey(
                db_index=False,
                on_delete=deletion.PROTECT,
                related_name="attach_handles",
                to="accelerators.deployable",
            ),
        ),
        migrations.RunSQL("RESET lock_timeout", migrations.RunSQL.noop),
    ]
