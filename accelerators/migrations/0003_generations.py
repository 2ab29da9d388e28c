"""Generations: how often each collection was written, counted by triggers. Profiles keep the order of their keys."""

from django.db import migrations, models

import accelerators.models.fields

COUNT = """
CREATE FUNCTION generation_count() RETURNS trigger LANGUAGE plpgsql AS $$
-- One more write of the collection named by the trigger's argument, in the writer's own transaction. A collection has as
-- many rows as it ever had writers at once: a writer takes one that nobody holds, so none ever waits for another.
BEGIN
  UPDATE generation SET value = value + 1 WHERE id = (
    SELECT id FROM generation WHERE collection = TG_ARGV[0] LIMIT 1 FOR UPDATE SKIP LOCKED);
  IF NOT FOUND THEN
    INSERT INTO generation (collection, value) VALUES (TG_ARGV[0], 1);
  END IF;
  RETURN NULL;
END $$;
"""

COLLECTIONS = {
    "host": "hosts",
    "device": "devices",
    "deployable": "devices",
    "attribute": "devices",
    "attachhandle": "devices",
    "deviceprofile": "profiles",
    "acceleratorrequest": "requests",
    "event": "events",
}
TRIGGERS = [
    f"CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_{table} "
    f"FOR EACH STATEMENT EXECUTE FUNCTION generation_count('{collection}')"
    for table, collection in COLLECTIONS.items()
]


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0002_events"),
    ]

    operations = [
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
        migrations.AddField(
            model_name="acceleratorrequest",
            name="label",
            field=models.CharField(blank=True, default="", help_text="Its project's own words for it.", max_length=255),
        ),
        migrations.AlterField(
            model_name="deviceprofile",
            name="groups",
            field=accelerators.models.fields.KeptJson(),
        ),
        migrations.RunSQL([COUNT, *TRIGGERS], migrations.RunSQL.noop),
    ]
