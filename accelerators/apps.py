"""Django's face of the room; periodic jobs are declared here."""

from typing import Any

from django.apps import AppConfig
from django.db import connection
from django.db.models.signals import post_migrate


class AcceleratorsConfig(AppConfig):
    name = "accelerators"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from accelerators import ticks

        post_migrate.connect(_migrated, sender=self)
        ticks.register("sweep", "accelerators.sweep.run", cluster="work")
        ticks.register("seals", "accelerators.retention.run", cluster="work")
        ticks.register("deadlines", "accelerators.binding.run_deadlines", cluster="work", timely=True)
        ticks.register("commands", "accelerators.outcomes.run", cluster="work", timely=True)
        ticks.register("images", "accelerators.fetching.run", cluster="work", timely=True)
        ticks.register("drains", "accelerators.lifecycle.run_drains", cluster="work", timely=True)
        ticks.register("bulks", "accelerators.bulks.run", cluster="work", timely=True)
        ticks.register("rollouts", "accelerators.rollouts.run", cluster="work", timely=True)


def _migrated(**about: Any) -> None:
    """After `migrate`: where a dump was restored, events' transactions go on where they ended."""
    if "plan" in about and about.get("using") == connection.alias:  # Django says it as well when tests empty tables
        with connection.cursor() as cursor:
            cursor.execute("SELECT to_regproc('accelerators_event_renumber') IS NOT NULL")
            if cursor.fetchone()[0]:
                cursor.execute("SELECT accelerators_event_renumber()")
