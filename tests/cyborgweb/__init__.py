"""Tests of `cyborgweb`."""
