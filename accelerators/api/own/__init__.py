"""Our own API: everything that an operator or a tenant may see and do, for programs and, in a browser, for people.

`cyborgweb.api` mounts it below `/api/`; `agents.api` adds its own resource in the same way.
"""
