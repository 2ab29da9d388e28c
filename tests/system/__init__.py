"""Tests of the whole product, which they run as separate processes. `make test-system` runs them."""
