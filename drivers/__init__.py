"""Hardware: words (`inventory`) and hands (everything else).

Ships to compute hosts, so it imports the standard library, msgspec and pyudev only.
"""
