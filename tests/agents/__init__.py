"""Tests of `agents`."""
