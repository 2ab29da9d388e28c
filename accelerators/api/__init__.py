"""The HTTP APIs of this package. `v2` is the OpenStack Accelerator API; `cyborgweb.urls` mounts it."""
