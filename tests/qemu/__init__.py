"""Tests of the agent on a real Debian kernel in QEMU; the product runs outside. `make deps-sim`, `make test-qemu`."""
