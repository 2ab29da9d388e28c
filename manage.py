#!/usr/bin/env python
"""Django's command line: `manage.py help` lists what an operator can do here."""

import os
import sys

if __name__ == "__main__":
    from cyborgweb.server.garbage import pause_while_loading

    pause_while_loading()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
    from django.core.management import execute_from_command_line
    from django.db import OperationalError
    from psycopg.errors import DeadlockDetected, LockNotAvailable

    from drivers.configuration import ConfigurationError

    try:
        execute_from_command_line(sys.argv)
    except ConfigurationError as error:
        sys.exit(f"manage.py: {error}")
    except OperationalError as error:
        if sys.argv[1:2] != ["migrate"] or not isinstance(error.__cause__, (LockNotAvailable, DeadlockDetected)):
            raise
        sys.exit(
            "manage.py: another transaction holds a table that a migration has to lock. This migration changed nothing;"
            " those before it are done. Run `manage.py migrate` again, or `manage.py prepare`, which tries for a minute"
        )
