"""Tests of the product: scenarios over HTTP and WebSocket with a real PostgreSQL, property tests of the pure core."""
