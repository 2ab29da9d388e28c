"""The console, over HTTP, against the real database."""
