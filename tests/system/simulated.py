"""Check and prepare what the simulation of several machines needs: root, network namespaces and nginx.

`namespaces` and `deployment` use this module. Debian's nginx is unpacked into `.sim/` of the checkout and not
installed, because its package would start a server. `make deps-sim` runs this file with any Python, before a virtual
environment exists, and after `tests.qemu.prepare`, because that empties `.sim/` when it makes it again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

UNSHARED = ("--net", "--mount", "--uts", "--pid")
HOLD = ("setpriv", "--pdeathsig", "KILL", "unshare", *UNSHARED, "--fork", "--kill-child", "--mount-proc", "sh", "-c")
"""The command that runs a shell script in its own namespaces and kills it when the process that started it ends."""
BRIDGE = "ip link add bridge type bridge forward_delay 0 && ip link set bridge up"
FOLDER = Path(__file__).resolve().parents[2] / ".sim" / "nginx"
NGINX = FOLDER / "usr/sbin/nginx"
STREAM = FOLDER / "usr/lib/nginx/modules/ngx_stream_module.so"
PACKAGES = ("nginx", "libnginx-mod-stream")


def missing() -> str:
    """Return the reason why several machines cannot be simulated here; '' if they can."""
    return _why_namespaces_are_refused() or (
        "" if NGINX.exists() and STREAM.exists() else "there is no nginx in .sim (make deps-sim)"
    )


def _why_namespaces_are_refused() -> str:
    if os.geteuid():
        return "only root makes networks"
    for program in ("ip", "unshare", "nsenter", "setpriv"):
        if not shutil.which(program):
            return f"there is no {program} here (apt-get install iproute2 util-linux)"
    tried = subprocess.run([*HOLD, BRIDGE], capture_output=True, text=True, check=False)
    return f"there can be no networks of one's own here: {tried.stderr.strip()}" if tried.returncode else ""


def fetch(into: Path) -> None:
    """Download nginx, unpack it into the folder `into` and try it. Raises OSError, CalledProcessError."""
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=into, check=True)
    for archive in into.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", archive, into], check=True)
        archive.unlink()
    subprocess.run([into / NGINX.relative_to(FOLDER), "-v"], check=True, capture_output=True)


def main() -> int:
    """Unpack nginx if it is missing. Return 0 if everything is there; else print the reason and return 1."""
    if not missing():
        return 0
    if why := _why_namespaces_are_refused():
        print(f"deps-sim: {why}", file=sys.stderr)
        return 1
    try:
        FOLDER.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
            made = Path(folder) / "nginx"
            made.mkdir()
            fetch(made)
            shutil.rmtree(FOLDER, ignore_errors=True)
            made.rename(FOLDER)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"deps-sim: nginx cannot be had: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
