"""Tests of `cyborgweb.manual`."""
