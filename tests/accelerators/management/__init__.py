"""Tests of `accelerators.management`."""
