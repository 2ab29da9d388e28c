"""Usage: what is held (the database's) beside how busy it is (what agents said last), and the census before a boot.

Called by `cyborgweb.api`, by the console's pages.
"""
