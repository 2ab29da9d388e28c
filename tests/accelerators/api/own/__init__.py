"""Tests of `accelerators.api.own`."""
