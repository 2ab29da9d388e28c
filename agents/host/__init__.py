"""The daemon on a compute host. Free of Django; its state is a journal on disk."""
