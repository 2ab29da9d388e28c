"""How many units are held (usage), how busy the devices are (load), and which hosts have room for more requests (the
load census, `census`).

The units that are held come from the database, the load of the devices from the last samples of the agents.
"""
