"""The v2 API over HTTP, against real rows."""
