"""The OpenStack Accelerator API, version 2, as Nova, openstacksdk and `openstack accelerator` use it.

A request passes through `urls`, `views` (order of checks), the file of its resource (`devices`, …) and `resource`
(SQL), which returns the body as bytes. "Contract" in this folder means the wire contract of upstream's v2 API.
"""
