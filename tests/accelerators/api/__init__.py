"""Tests of `accelerators.api`."""
