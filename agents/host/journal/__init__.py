"""The agent's journal on disk: the state that survives a restart."""
