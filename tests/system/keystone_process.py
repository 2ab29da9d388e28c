"""Run Keystone's WSGI application on a socket that `tests.system.keystone` passes on.

Run as `python -m tests.system.keystone_process FD` by the interpreter of Keystone's own environment; of our
code it imports only the function that makes it end with its parent.
"""

from __future__ import annotations

import socket
import sys

from drivers.isolation.process import die_with_parent

THREADS = 8


def main() -> None:
    """Serve until killed, with the configuration in the folder `OS_KEYSTONE_CONFIG_DIR`."""
    die_with_parent()
    listener = socket.socket(fileno=int(sys.argv.pop()))  # Keystone parses the remaining command line
    import waitress
    from keystone.server.wsgi import initialize_public_application

    waitress.serve(initialize_public_application(), sockets=[listener], threads=THREADS, _quiet=True)


if __name__ == "__main__":
    main()
