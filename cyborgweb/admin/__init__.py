"""Console pages of access and of the read-only switch. Loaded by Django's admin."""

from cyborgweb.admin import access, read_only

__all__ = ["access", "read_only"]
