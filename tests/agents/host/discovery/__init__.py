"""Tests of `agents.host.discovery`."""
