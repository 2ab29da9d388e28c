"""Read-only models of drivers' backends and services: database views of what hosts report (`Host.drivers`) and of the
wanted settings of drivers."""

from __future__ import annotations

from django.db import models

from accelerators.domain.states import BackendState


class Backend(models.Model):
    """A part of a driver on a host that answers, or fails, independently of the driver's other parts.

    The host's agent reports it, or the wanted settings of the driver configure it, or both.
    """

    id = models.BigIntegerField(primary_key=True)
    key = models.TextField(help_text="HOST:DRIVER:NAME with the uuid of the host.")
    place = models.TextField(help_text="Sort key: the name of the host, then the other parts.")
    host = models.TextField()
    driver = models.TextField()
    name = models.TextField()
    kind = models.TextField()
    labels = models.JSONField()
    error = models.TextField()
    since = models.DateTimeField()
    services = models.JSONField()
    devices = models.IntegerField()
    state = models.TextField(choices=BackendState.choices())
    reason = models.TextField(help_text="Why it does not answer; empty if it does.")
    settings = models.JSONField(null=True, help_text="Its section of the wanted settings; null if it has none.")
    generation = models.BigIntegerField(help_text="The generation of the wanted configuration of its driver.")

    class Meta:
        managed = False
        db_table = "accelerators_backend"
        ordering = ["key"]

    def __str__(self) -> str:
        return f"{self.driver}:{self.name}"


class Service(models.Model):
    """A function that a backend offers, with its state and, if it is not available, the reason."""

    id = models.BigIntegerField(primary_key=True)
    key = models.TextField(help_text="HOST:DRIVER:BACKEND:NAME with the uuid of the host.")
    place = models.TextField(help_text="Sort key: the name of the host, then the other parts.")
    host = models.TextField()
    driver = models.TextField()
    backend = models.TextField()
    name = models.TextField()
    version = models.TextField()
    state = models.TextField()
    reason = models.TextField()
    limits = models.JSONField()

    class Meta:
        managed = False
        db_table = "accelerators_service"
        ordering = ["key"]

    @property
    def backend_key(self) -> str:
        """The key of the backend that offers the service."""
        return self.key.removesuffix(f":{self.name}")

    def __str__(self) -> str:
        return f"{self.name} of {self.driver}:{self.backend}"
