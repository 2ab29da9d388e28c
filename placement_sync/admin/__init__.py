"""Console pages of Placement. Loaded by Django's admin."""

from placement_sync.admin import hosts, writer

__all__ = ["hosts", "writer"]
