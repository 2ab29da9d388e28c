"""The connection to the gateway: addresses, keys, sessions."""
