"""Tests of `agents.host.journal`."""
