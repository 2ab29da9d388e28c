"""Tests of `placement_sync`."""
