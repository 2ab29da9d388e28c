"""Tests of `agents.wire`."""
