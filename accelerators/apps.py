"""Django's face of the room; periodic jobs are declared here."""

from django.apps import AppConfig


class AcceleratorsConfig(AppConfig):
    name = "accelerators"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from accelerators import ticks

        ticks.register("sweep", "accelerators.sweep.run", cluster="work")
        ticks.register("seals", "accelerators.retention.run", cluster="work")
        ticks.register("deadlines", "accelerators.binding.run_deadlines", cluster="work", timely=True)
        ticks.register("commands", "accelerators.outcomes.run", cluster="work", timely=True)
        ticks.register("images", "accelerators.fetching.run", cluster="work", timely=True)
        ticks.register("drains", "accelerators.lifecycle.run_drains", cluster="work", timely=True)
        ticks.register("bulks", "accelerators.bulks.run", cluster="work", timely=True)
        ticks.register("rollouts", "accelerators.rollouts.run", cluster="work", timely=True)
