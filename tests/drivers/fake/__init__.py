"""Tests of `drivers.fake`."""
