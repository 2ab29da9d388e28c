"""Tests of `agents.host.checking`."""
