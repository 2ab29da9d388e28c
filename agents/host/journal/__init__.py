"""The local journal: what survives the end of the agent."""
