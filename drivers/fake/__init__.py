"""The fake driver, which has simulated hardware; `python -m drivers.fake` changes that hardware."""
