"""Tests of `cyborgweb.notify`."""
