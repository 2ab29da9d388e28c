"""Metrics for Prometheus: `page` answers `/metrics`, `snapshot` and `backlog` read the database, `served` counts our
requests and `calls` counts calls to other services.
"""
