"""The bench: every published figure against its ceiling in the same run. Asked for by `make bench`, never by pytest."""
