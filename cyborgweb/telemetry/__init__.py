"""Usage (the number of units that are held), load (how busy the devices are), and the load census (`census`: which
hosts have room for more requests).

The units that are held come from the database, the load of the devices from the last samples of the agents.
"""
