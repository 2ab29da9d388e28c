"""Tests of `accelerators.domain`."""
