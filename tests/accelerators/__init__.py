"""Tests of `accelerators`."""
