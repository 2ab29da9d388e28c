"""Services that every process of the controller uses: jobs, notifications, caches and metrics."""
