"""The REST faces of the room: `v2` speaks OpenStack's Accelerator API. Mounted by `cyborgweb.urls`."""
