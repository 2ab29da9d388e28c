"""Hardware drivers: the data types that describe hardware (`inventory`), and the code that reads and changes it.

This package is installed on compute hosts, so it imports only the standard library, msgspec and pyudev.
"""
