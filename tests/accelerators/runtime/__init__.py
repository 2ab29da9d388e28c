"""Tests of `accelerators.runtime`."""
