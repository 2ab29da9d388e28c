"""Tests of `accelerators.api.v2`."""
