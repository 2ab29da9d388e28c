"""Keystone as a process: its WSGI application on a socket handed over by `tests.system.keystone`.

Run as `python -m tests.system.keystone_process FD` by the interpreter of Keystone's own environment; it imports
nothing of ours but the leash.
"""

from __future__ import annotations

import socket
import sys

from drivers.isolation.process import die_with_parent

THREADS = 8


def main() -> None:
    """Serve until killed; the configuration is where `OS_KEYSTONE_CONFIG_DIR` says."""
    die_with_parent()
    listener = socket.socket(fileno=int(sys.argv.pop()))  # Keystone reads what is left of the command line
    import waitress
    from keystone.server.wsgi import initialize_public_application

    waitress.serve(initialize_public_application(), sockets=[listener], threads=THREADS, _quiet=True)


if __name__ == "__main__":
    main()
