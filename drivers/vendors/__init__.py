"""Drivers for the cards of single vendors. Each is `drivers.pci.functions` with a kind of cards of its own."""
