"""Tests of `cyborgweb.server`."""
