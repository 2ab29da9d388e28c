"""Agents and their connections.

`wire` and `credentials` define the protocol, `host` is the daemon on compute hosts; the rest is the controller's side.
"""
