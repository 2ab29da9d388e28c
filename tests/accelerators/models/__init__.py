"""Tests of `accelerators.models`."""
