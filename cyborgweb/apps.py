"""Django application of the console: registers jobs and checks, and makes the groups of the roles after migrate."""

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class CyborgwebConfig(AppConfig):
    name = "cyborgweb"
    verbose_name = "Access"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from accelerators.runtime import jobs
        from cyborgweb.server import deploy_checks  # noqa: F401  (registers its checks)

        post_migrate.connect(_migrated, sender=self)
        jobs.register("messages", "cyborgweb.notify.fanout.run", cluster="work", timely=True)
        jobs.register("deliveries", "cyborgweb.notify.sender.run", cluster="work", timely=True)
        jobs.register("mails", "cyborgweb.notify.sender.run_mails", cluster="work", timely=True)


def _migrated(**about: Any) -> None:
    """Create the groups of the roles after `migrate`, and set their permissions.

    Does nothing while the migrations applied so far do not include the application `auth`.
    """
    from cyborgweb.auth import roles

    if "plan" in about and "auth" in about["apps"].app_configs:  # Django also sends it when tests empty tables
        for role in roles.ROLES:
            roles.group(role.group)
