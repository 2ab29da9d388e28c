"""The room's own lists and pages in the console: everything is shown here, nothing is written.

Loaded by Django's admin. Pages that show more than one room live in `cyborgweb.pages`.
"""

from accelerators.admin import devices, hosts, records, requests

__all__ = ["devices", "hosts", "records", "requests"]
