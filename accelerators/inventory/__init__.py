"""Merge reports of agents into the stored inventory."""
