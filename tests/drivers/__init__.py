"""Tests of `drivers`."""
