"""Our own API at /api/: its root page and its OpenAPI document."""
