"""Add the columns of signed seals, and refuse unsigned seals after the first signed one."""

from pathlib import Path

from django.db import migrations, models

TEXT = {"blank": True, "db_default": "", "default": ""}


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0006_correct_claims_in_sets")]

    operations = [
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'"),
        migrations.AddField(
            "seal",
            "kind",
            models.CharField(
                max_length=8,
                db_collation="C",
                help_text="What it records: `events`, `drop` (of a month) or `key` (another key signs from the next seal "
                "on). Empty in seals that are not signed.",
                **TEXT,
            ),
        ),
        migrations.AddField(
            "seal",
            "details",
            models.TextField(
                help_text="A JSON object: what justified the drop of a month, or the new key and why it signs.", **TEXT
            ),
        ),
        migrations.AddField(
            "seal",
            "key",
            models.CharField(
                max_length=64,
                db_collation="C",
                help_text="The public key (Ed25519, in hex) that verifies its signature; empty: it is not signed.",
                **TEXT,
            ),
        ),
        migrations.AddField(
            "seal",
            "signature",
            models.CharField(
                max_length=128,
                db_collation="C",
                help_text="Signature (Ed25519, in hex) over the same values as the hash.",
                **TEXT,
            ),
        ),
        migrations.RunSQL((Path(__file__).with_name("sql") / "signed_seals.sql").read_text()),
    ]
