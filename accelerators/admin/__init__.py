"""The room's own lists and pages in the console. Inventory is shown; what is decided goes through the conductor.

Loaded by Django's admin. Pages that show more than one room live in `cyborgweb.pages`.
"""

from accelerators.admin import attachments, bulks, commands, devices, drivers, hosts, records, requests, rules

__all__ = ["attachments", "bulks", "commands", "devices", "drivers", "hosts", "records", "requests", "rules"]
