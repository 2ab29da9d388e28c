"""Register the console pages about Placement and Nova with Django's admin."""

from placement_sync.admin import hosts, nova, writer

__all__ = ["hosts", "nova", "writer"]
