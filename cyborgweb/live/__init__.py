"""The live feed: console pages are updated while somebody looks at them.

`socket` is the browser's WebSocket on the event loop, `feed` the one thread that queries the database, `list_snapshot`
a list as one person sees it, `session_permissions` the check who may watch, `usage` a device's usage as server-sent
events.
"""
