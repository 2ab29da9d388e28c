#!/usr/bin/env python
"""Django's command line: `manage.py help` lists what an operator can do here."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
    from django.core.management import execute_from_command_line

    from drivers.configuration import ConfigurationError

    try:
        execute_from_command_line(sys.argv)
    except ConfigurationError as error:
        sys.exit(f"manage.py: {error}")
