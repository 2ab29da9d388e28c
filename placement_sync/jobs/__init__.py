"""Jobs that keep Placement and Nova in step with the inventory."""
