"""What all processes of the controller share: jobs, notifications, caches and metrics."""
