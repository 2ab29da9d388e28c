"""The OpenStack Accelerator API, version 2, as Nova, openstacksdk and `openstack accelerator` speak it.

A request's way: `urls` → `views` (order of evaluation) → a resource's file (`devices`, …) → `resource` (SQL) → bytes.
"Contract" in this folder means the wire contract of upstream's v2 API.
"""
