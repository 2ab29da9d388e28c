"""Django's face of the house."""

from django.apps import AppConfig


class CyborgwebConfig(AppConfig):
    name = "cyborgweb"
    verbose_name = "Access"
    default_auto_field = "django.db.models.BigAutoField"
