"""Pages that show more than one room."""
