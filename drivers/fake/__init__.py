"""A driver with simulated hardware. `python -m drivers.fake` changes that hardware."""
