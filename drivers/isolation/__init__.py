"""Run each driver in a process of its own that has few rights on the host."""
