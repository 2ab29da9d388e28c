"""Tests of `accelerators.workflows`."""
