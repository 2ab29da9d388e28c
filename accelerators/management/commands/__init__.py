"""The subcommands of `manage.py`."""
