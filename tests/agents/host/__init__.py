"""Tests of `agents.host`."""
