"""The agent: the daemon on a compute host. It does not use Django and keeps its state in a journal on disk."""
