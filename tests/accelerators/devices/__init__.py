"""Tests of `accelerators.devices`."""
