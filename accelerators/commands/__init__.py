"""Commands to agents: place them, read their state, and list which ones exist."""
