"""The console's lists and pages of this app, registered with Django's admin.

They only read the inventory; decisions of people are written by the conductor. Pages that show data of several apps
live in `cyborgweb.pages`.
"""

from accelerators.admin import (
    admission_rules,
    attachments,
    backends,
    bulk_actions,
    commands,
    devices,
    drivers,
    events_and_intents,
    hosts,
    profiles,
    requests,
)

__all__ = [
    "admission_rules",
    "attachments",
    "backends",
    "bulk_actions",
    "commands",
    "devices",
    "drivers",
    "events_and_intents",
    "hosts",
    "profiles",
    "requests",
]
