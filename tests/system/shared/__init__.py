"""Tests that share one product with default settings and kill no part of it."""
