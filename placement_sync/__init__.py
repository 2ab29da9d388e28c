"""Connect the conductor to OpenStack: Placement, Nova and Glance.

* Placement: write the providers of each host (`apply_writes`, `jobs.providers`), claim and release for attachments
  (`jobs.attachments`), compare allocations with requests (`jobs.discrepancies`).
* Nova: send notices about bound or failed requests (`nova.notices`), release the requests of deleted instances
  (`nova.deleted_instances`), look up the states of instances (`nova.client`).
* Both: answer the holder checks before a destructive act (`jobs.holder_checks`).
* Glance: download images (`glance`).

`apps` registers what the configured endpoints allow. `client`, `apply_writes`, `reconcile`, `mapping`, `allocations`
and `agent_writer` are free of Django, because agents use them on compute hosts.
"""
