"""Raises the limit of open files of a web process."""

from __future__ import annotations

import logging
import resource

RESERVED_FILES = 500
"""Open files that are reserved for everything but connections of agents and HTTP clients: the database, code."""


def raise_file_limit(agents: int, http_clients: int) -> None:
    """Raise the limit of open files to the hard limit; log a warning if that is too low for so many agents and clients.

    Every connection is an open file, and the usual soft limit of 1 024 is meant for a shell.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    others = http_clients + RESERVED_FILES
    if hard != resource.RLIM_INFINITY and hard < agents + others:
        logging.getLogger(__name__).warning(
            "only %d open files are allowed: about %d agents can be connected, not %d (CYBORG_AGENT_CONNECTIONS),"
            " beside %d clients (CYBORG_HTTP_CONNECTIONS); raise LimitNOFILE of the service, or `ulimit -Hn`",
            *(hard, max(0, hard - others), agents, http_clients),
        )
