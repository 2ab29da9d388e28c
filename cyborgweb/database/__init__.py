"""PostgreSQL: find it, start the embedded one, connect to it."""
