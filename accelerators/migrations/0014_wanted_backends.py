"""Show backends that are configured and not reported, with their state and the reason.

The view only gets more rows, and more columns at its end, so the previous release reads it as before.
"""

from pathlib import Path

from django.db import migrations

STATE = (Path(__file__).with_name("sql") / "wanted_backends.sql").read_text()


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0013_bulk_targets")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.RunSQL(STATE, migrations.RunSQL.noop),
    ]
