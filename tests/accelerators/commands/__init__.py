"""Tests of `accelerators.commands`."""
