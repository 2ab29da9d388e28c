"""Usage: units that are held (from the database), joined with how busy their devices are (from agents' last
samples), and the load census before a boot.
"""
