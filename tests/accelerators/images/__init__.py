"""Tests of `accelerators.images`."""
