"""Tests of `cyborgweb.auth`."""
