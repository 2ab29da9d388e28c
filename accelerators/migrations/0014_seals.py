"""Seals over events: each event knows its transaction, so that what can still be committed is known; and TRUNCATE is
refused as UPDATE and DELETE are.

The column costs no rewrite: events that are there already are of transaction 0, in the order of their ids.
"""

from django.db import migrations, models
from django.db.models import Func

COLUMN = """
CREATE FUNCTION accelerators_event_ahead() RETURNS bigint LANGUAGE sql STABLE AS 'SELECT 0::bigint';
ALTER TABLE accelerators_event ADD COLUMN tx bigint NOT NULL DEFAULT 0;
CREATE FUNCTION accelerators_event_tx() RETURNS bigint LANGUAGE sql STABLE AS $$
  SELECT pg_current_xact_id()::text::bigint + accelerators_event_ahead()
$$;
CREATE FUNCTION accelerators_event_final() RETURNS bigint LANGUAGE sql STABLE AS $$
-- Events of transactions below this one are all committed: nobody can add to them any more.
  SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint + accelerators_event_ahead()
$$;
ALTER TABLE accelerators_event ALTER COLUMN tx SET DEFAULT accelerators_event_tx();

CREATE FUNCTION accelerators_event_renumber() RETURNS void LANGUAGE plpgsql AS $$
-- A database that was restored elsewhere numbers its transactions from lower on; events' go on where they ended.
DECLARE
  last bigint := (SELECT coalesce(max(tx), 0) FROM accelerators_event);
  next bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
BEGIN
  IF last >= next + accelerators_event_ahead() THEN
    EXECUTE format('CREATE OR REPLACE FUNCTION accelerators_event_ahead() RETURNS bigint LANGUAGE sql STABLE AS %L',
      format('SELECT %s::bigint', last - next + 1));
  END IF;
END $$;
"""
KEPT = """
CREATE FUNCTION accelerators_event_keep(name regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format('CREATE OR REPLACE TRIGGER accelerators_kept BEFORE TRUNCATE ON %s '
    'FOR EACH STATEMENT EXECUTE FUNCTION accelerators_event_frozen()', name);
END $$;
SELECT accelerators_event_keep('accelerators_event');
SELECT accelerators_event_keep(inhrelid::regclass) FROM pg_inherits WHERE inhparent = 'accelerators_event'::regclass;
SELECT accelerators_event_keep('accelerators_seal');
CREATE TRIGGER accelerators_seal_frozen BEFORE DELETE OR UPDATE OF number, month, tx, event, events, digest, hash, drops,
  sealed_at ON accelerators_seal FOR EACH ROW EXECUTE FUNCTION accelerators_event_frozen();

CREATE OR REPLACE FUNCTION accelerators_event_months(ahead int) RETURNS void LANGUAGE plpgsql AS $$
-- Partitions for this month and `ahead` more. What fell into the default partition meanwhile stays there.
DECLARE
  first timestamptz := date_trunc('month', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC';
  month timestamptz;
  part text;
BEGIN
  FOR n IN 0..ahead LOOP
    month := (first AT TIME ZONE 'UTC' + make_interval(months => n)) AT TIME ZONE 'UTC';
    part := 'accelerators_event_' || to_char(month AT TIME ZONE 'UTC', 'YYYY_MM');
    CONTINUE WHEN to_regclass(part) IS NOT NULL;
    CONTINUE WHEN EXISTS (SELECT 1 FROM accelerators_event_rest WHERE at >= month
      AND at < (month AT TIME ZONE 'UTC' + interval '1 month') AT TIME ZONE 'UTC');
    EXECUTE format('CREATE TABLE %I PARTITION OF accelerators_event FOR VALUES FROM (%L) TO (%L)', part, month,
      (month AT TIME ZONE 'UTC' + interval '1 month') AT TIME ZONE 'UTC');
    PERFORM accelerators_event_keep(part::regclass);
  END LOOP;
END $$;
"""


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0013_event_words")]
    operations = [
        # Behind an export that reads, this would wait, and behind this everybody who writes.
        migrations.RunSQL("SET LOCAL lock_timeout = '3s'", migrations.RunSQL.noop),
        migrations.SeparateDatabaseAndState(
            [migrations.RunSQL(COLUMN, migrations.RunSQL.noop)],
            [
                migrations.AddField(
                    "event",
                    "tx",
                    models.BigIntegerField(
                        db_default=Func(function="accelerators_event_tx"),
                        editable=False,
                        help_text="The database's transaction that wrote it.",
                    ),
                )
            ],
        ),
        migrations.CreateModel(
            name="Seal",
            fields=[
                ("number", models.BigIntegerField(primary_key=True, serialize=False)),
                (
                    "month",
                    models.CharField(db_collation="C", help_text="Of its events; none has those of two.", max_length=7),
                ),
                ("tx", models.BigIntegerField(help_text="Transaction of its last event.")),
                ("event", models.BigIntegerField(help_text="Its last event, in the order of transaction and id.")),
                ("events", models.IntegerField(help_text="How many it is about.")),
                ("digest", models.CharField(db_collation="C", help_text="Over all of them.", max_length=64)),
                (
                    "drops",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        default="",
                        help_text="The month whose events were dropped with it.",
                        max_length=7,
                    ),
                ),
                ("sealed_at", models.DateTimeField()),
                (
                    "hash",
                    models.CharField(
                        db_collation="C",
                        help_text="Over what stands here and the hash of the seal before.",
                        max_length=64,
                    ),
                ),
                (
                    "marks",
                    models.BinaryField(
                        default=b"", help_text="Four bytes an event, to find the one that does not fit."
                    ),
                ),
            ],
            options={
                "ordering": ["-number"],
                "indexes": [models.Index(fields=["tx", "event"], name="seal_last")],
            },
        ),
        migrations.RunSQL(KEPT, migrations.RunSQL.noop),
    ]
