"""Console pages of access and of the read-only switch. Django's admin imports this package by its name."""

from cyborgweb.admin import access, read_only

__all__ = ["access", "read_only"]
