"""Tests of `cyborgweb.console`."""
