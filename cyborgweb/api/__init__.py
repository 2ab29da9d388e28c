"""Our own API below `/api/`: its routes, its root page and its OpenAPI document."""
