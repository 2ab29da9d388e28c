"""Tests of `drivers.isolation`."""
