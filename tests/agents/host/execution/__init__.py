"""Tests of `agents.host.execution`."""
