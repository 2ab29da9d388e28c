"""The real agent on a real Debian kernel in QEMU, the product outside. `make test-qemu`, after `make deps-sim`."""
