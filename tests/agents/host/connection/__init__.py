"""Tests of `agents.host.connection`."""
