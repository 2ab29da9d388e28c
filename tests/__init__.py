"""Proofs. Stories over HTTP and WebSocket against a real PostgreSQL, properties for the pure core."""
