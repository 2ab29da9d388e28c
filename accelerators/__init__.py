"""Store the accelerator inventory, requests, commands and events, and enforce the rules for changing them.

`conductor` is the only writer of these tables. This package imports `drivers` (its data types); it never imports
`agents`, `placement_sync` or `cyborgweb`.
"""
