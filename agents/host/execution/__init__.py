"""Carry out commands on this host: plan, check the host's state, run, and recover after a crash."""
