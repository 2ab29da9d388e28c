"""The room's own lists and pages in the console. Inventory is shown; what is decided goes through the conductor.

Loaded by Django's admin. Pages that show more than one room live in `cyborgweb.pages`.
"""

from accelerators.admin import (
    admission_rules,
    attachments,
    bulk_actions,
    commands,
    devices,
    drivers,
    hosts,
    records,
    requests,
)

__all__ = [
    "admission_rules",
    "attachments",
    "bulk_actions",
    "commands",
    "devices",
    "drivers",
    "hosts",
    "records",
    "requests",
]
