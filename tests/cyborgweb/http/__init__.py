"""Tests of `cyborgweb.middleware`."""
