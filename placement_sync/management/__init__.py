"""Management commands of `placement_sync`."""
