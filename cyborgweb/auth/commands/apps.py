"""The Django application of the commands that replace those of `django.contrib.auth`."""

from django.apps import AppConfig


class AuthCommandsConfig(AppConfig):
    """The application `cyborgweb.auth.commands`, without models."""

    name = "cyborgweb.auth.commands"
    label = "auth_commands"
