"""`manage.py openapi_page`: print the OpenAPI document of `/api/`, which `make docs` stores as `docs/openapi.yaml`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand


class Command(BaseCommand):
    """Write YAML to standard output; fail if drf-spectacular had to guess anything or the document is invalid."""

    help = "Print the OpenAPI document of /api/."
    requires_system_checks = ()

    def handle(self, *args: Any, **options: Any) -> None:
        """Validate the document, then print it as YAML.

        Raises jsonschema's ValidationError if the document is invalid, ValueError if drf-spectacular had to guess.
        """
        from cyborgweb.api.openapi import render_yaml, validate_document

        validate_document()
        self.stdout.write(render_yaml(), ending="")
