"""Tests of the daemon on a compute host. No Django here."""
