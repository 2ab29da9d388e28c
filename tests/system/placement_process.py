"""Run Placement's WSGI application on a socket that `tests.system.placement` passes on.

Run as `python -m tests.system.placement_process FD` by the interpreter of Placement's own environment; of our
code it imports only the function that makes it end with its parent.
"""

from __future__ import annotations

import socket
import sys

from drivers.isolation.process import die_with_parent

THREADS = 16


def main() -> None:
    """Serve until killed, with the configuration in the folder `OS_PLACEMENT_CONFIG_DIR`."""
    die_with_parent()
    listener = socket.socket(fileno=int(sys.argv.pop()))
    import waitress
    from placement.wsgi import init_application

    waitress.serve(init_application(), sockets=[listener], threads=THREADS, _quiet=True)


if __name__ == "__main__":
    main()
