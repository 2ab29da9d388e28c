"""Nova: its client, notices about bound requests, and deleted instances."""
