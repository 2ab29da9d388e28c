"""Tests of `cyborgweb.live`."""
