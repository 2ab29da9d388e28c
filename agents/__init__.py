"""Both ends of the wire: `wire` the messages, `host` the daemon on compute hosts, the rest the conductor's end."""
