"""Register the console pages about Placement with Django's admin."""

from placement_sync.admin import hosts, writer

__all__ = ["hosts", "writer"]
