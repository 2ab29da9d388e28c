"""Tests of `accelerators.inventory`."""
