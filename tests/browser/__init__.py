"""Tests of the console in a real browser. They run with `make test-browser`, after `make deps-browser`."""
