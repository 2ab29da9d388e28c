"""Tests of `accelerators.audit`."""
