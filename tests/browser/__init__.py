"""The console in a real browser, as people use it. `make test-browser`, after `make deps-browser`."""
