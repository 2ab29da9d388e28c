"""Tests of `cyborgweb.monitoring`."""
