"""Tests of `agents.gateway`."""
