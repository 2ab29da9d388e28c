"""Run each driver in a process of its own, with few rights on the host."""
