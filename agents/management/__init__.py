"""Management commands of this package (`manage.py`)."""
