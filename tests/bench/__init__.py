"""The bench: measure each published figure and its ceiling in the same run. `make bench` runs it, pytest never does."""
