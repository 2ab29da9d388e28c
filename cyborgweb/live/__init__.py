"""The live feed: what a page of the console shows is told anew when it changes.

`socket` is the browser's end on the event loop, `feed` the one thread that asks the database, `shown` a list's cells.
"""
