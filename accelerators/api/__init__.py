"""The HTTP APIs of the room. `v2` is the OpenStack Accelerator API; `cyborgweb.urls` mounts it."""
