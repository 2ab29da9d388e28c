"""Our own API over HTTP."""
