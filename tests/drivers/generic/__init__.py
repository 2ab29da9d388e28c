"""Tests of `drivers.generic`."""
