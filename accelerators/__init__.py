"""Store the accelerator inventory, requests, commands and events, and enforce the rules for changing them.

`conductor` is the only writer of these tables. Of the other packages this one imports only `drivers` (its vocabulary);
it never imports `agents`, `placement_sync` or `cyborgweb`.
"""
