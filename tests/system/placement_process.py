"""Placement as a process: its WSGI application on a socket handed over by `tests.system.placement`.

Run as `python -m tests.system.placement_process FD` by the interpreter of Placement's own environment; it imports
nothing of ours but the leash.
"""

from __future__ import annotations

import socket
import sys

from drivers.isolation.process import die_with_parent

THREADS = 16


def main() -> None:
    """Serve until killed; the configuration is where `OS_PLACEMENT_CONFIG_DIR` says."""
    die_with_parent()
    listener = socket.socket(fileno=int(sys.argv.pop()))
    import waitress
    from placement.wsgi import init_application

    waitress.serve(init_application(), sockets=[listener], threads=THREADS, _quiet=True)


if __name__ == "__main__":
    main()
