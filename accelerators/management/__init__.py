"""Management commands of this package (`manage.py`), and the helpers they share."""
