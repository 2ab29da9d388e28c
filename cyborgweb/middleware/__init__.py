"""Django middleware that sees every request."""
