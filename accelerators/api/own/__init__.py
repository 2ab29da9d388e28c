"""Our own API: everything an operator or a tenant may know, for programs and, in a browser, for people.

`cyborgweb.api` mounts it below `/api/`; `agents.api` adds its own resource to the same pattern.
"""
