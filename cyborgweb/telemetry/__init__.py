"""Usage of units and load of devices, and the load census.

Units that are held come from the database, the load of their devices from agents' last samples.
"""
