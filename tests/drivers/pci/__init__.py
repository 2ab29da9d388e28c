"""Tests of `drivers.pci`."""
