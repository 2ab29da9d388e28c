"""Tests of the vendors' drivers."""
