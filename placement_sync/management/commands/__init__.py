"""Management commands about Placement."""
