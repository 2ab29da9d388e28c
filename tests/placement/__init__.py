"""What OpenStack is told."""
