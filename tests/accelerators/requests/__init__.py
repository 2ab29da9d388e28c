"""Tests of `accelerators.requests`."""
