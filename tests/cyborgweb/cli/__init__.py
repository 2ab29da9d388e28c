"""Tests of `cyborgweb.cli`."""
